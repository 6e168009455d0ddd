"""Sharding constraints of plugins, checked against the layout before anything is cut."""

from __future__ import annotations

import math

from polyshard.bound import Binding
from polyshard.errors import PluginError
from polyshard.layout import GroupLayout, ParameterLayout
from polyshard.seams import GroupInfo


def contiguous_run(placed: ParameterLayout) -> int:
    """Elements between two places where ranks part, in the memory of the full parameter."""
    if placed.dim is None:
        return placed.numel
    return math.prod(placed.chunk_shape[placed.dim :])


def check_constraints(binding: Binding, group: GroupInfo, layout: GroupLayout) -> None:
    """Refuse a layout that would separate elements a plugin needs together.

    Raises:
        PluginError: listing every parameter and plugin concerned.
    """
    problems = []
    for constraint in binding.contributions.constraints:
        for info, placed in zip(group.parameters, layout.parameters, strict=True):
            block = binding.block_elements(constraint, info)
            run = contiguous_run(placed)
            if layout.world_size > 1 and block > 1 and run % block and placed.dim is not None:
                problems.append(
                    f"plugin '{constraint.name}' needs blocks of {block} elements of '{info.fqn}' "
                    f"{info.shape} on one rank, but {layout.world_size} ranks part it every {run} "
                    "elements. Choose another block, shard another dim, or leave the parameter out."
                )
    if problems:
        raise PluginError("\n".join(problems))
