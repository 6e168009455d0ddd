"""The frozen description of a group: what it holds, what travels, and who takes part.

A plan is text and numbers only. All ranks compare its lines before the first collective, and
``describe()`` shows the same lines to a person.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import override

from polyshard._torch_private import reduces_in_original_dtype
from polyshard.layout import GroupLayout
from polyshard.policies import MixedPrecisionPolicy
from polyshard.seams import ParamInfo
from polyshard.ways import Way


@dataclass(frozen=True)
class Dtypes:
    """The three dtypes of a group: at rest, in compute and on the wire, in reduction."""

    orig: torch.dtype
    param: torch.dtype
    reduce: torch.dtype

    @override
    def __str__(self) -> str:
        """Short names in that order."""
        names = (str(d).removeprefix("torch.") for d in (self.orig, self.param, self.reduce))
        return " / ".join(names)


def resolve_dtypes(policy: MixedPrecisionPolicy, orig: torch.dtype) -> Dtypes:
    """What ``policy`` makes of parameters of dtype ``orig``; defaults are the installed torch's."""
    param = policy.param_dtype if orig.is_floating_point else None
    compute = param or orig
    default = orig if reduces_in_original_dtype() else compute
    return Dtypes(orig, compute, policy.reduce_dtype or default)


@dataclass(frozen=True)
class Roles:
    """Who does what for a group: names with settings, as they must agree on all ranks."""

    transport: str
    gather_codec: str
    reduce_codec: str
    storage: str
    plugins: tuple[str, ...] = ()


@dataclass(frozen=True)
class GroupPlan:
    """One parameter group. Sizes are per rank unless a name says otherwise."""

    name: str
    parameters: tuple[ParamInfo, ...]
    layout: GroupLayout
    mesh: str
    dtypes: Dtypes
    roles: Roles
    reshard_after_forward: bool | int
    """Freed after forward, kept, or kept once by each block of so many ranks."""
    gather_bytes: int
    """Bytes this rank sends in one all-gather."""
    regather_bytes: int
    """Bytes this rank sends to gather again in backward, if freed after forward."""
    reduce_bytes: int
    """Bytes this rank sends in one reduce-scatter of all trainable parameters."""
    ways: tuple[Way, ...]
    """How each parameter travels in an all-gather, and why; gradients take the mirrored way."""
    transfers: str
    """The ways in one line, with where their threshold comes from."""
    notices: tuple[str, ...] = ()
    """Settings that change nothing for this group."""

    @property
    def numel(self) -> int:
        """Elements of all full parameters."""
        return sum(p.numel for p in self.layout.parameters)

    @property
    def unsharded_bytes(self) -> int:
        """Memory the unsharded parameters take while gathered."""
        return self.layout.unsharded_numel * self.dtypes.param.itemsize

    @property
    def shard_bytes(self) -> int:
        """Memory of the shard at rest."""
        return self.layout.shard_numel * self.dtypes.orig.itemsize

    def lines(self) -> tuple[str, ...]:
        """Everything that must be equal on all ranks, one fact a line."""
        head = (
            f"group {self.name}: mesh {self.mesh}",
            f"group {self.name}: dtypes (rest / compute / reduce) {self.dtypes}",
            f"group {self.name}: transport {self.roles.transport}, gather codec "
            f"{self.roles.gather_codec}, reduce codec {self.roles.reduce_codec}, storage "
            f"{self.roles.storage}",
            f"group {self.name}: reshard after forward {self.reshard_after_forward}",
        )
        plugins = tuple(f"group {self.name}: plugin {line}" for line in self.roles.plugins)
        parameters = tuple(
            f"group {self.name}: parameter {info.fqn} {info.shape} dim {placed.dim} "
            f"{way.kind} at {placed.shard_offset} "
            + " ".join(("trainable" if info.requires_grad else "frozen", *info.facts))
            for info, placed, way in zip(
                self.parameters, self.layout.parameters, self.ways, strict=True
            )
        )
        return head + plugins + parameters
