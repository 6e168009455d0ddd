"""Makes the plan of a group: who does what, how each parameter travels, bytes to the last one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyshard.notices import all_notices
from polyshard.plan import GroupPlan, Roles
from polyshard.protocol import ProtocolGather
from polyshard.runtime import Runtime
from polyshard.seams import Named
from polyshard.ways import summary, ways_of

if TYPE_CHECKING:
    from polyshard.group import ParameterGroup


def plan_group(group: ParameterGroup, runtime: Runtime) -> GroupPlan:
    """The plan of ``group`` as ``runtime`` is going to carry it out."""
    contributions, shards, transport = group.contributions, group.shards, group.transport
    gather_codec = _gather_codec(group, runtime)
    ways = ways_of(shards.layout, transport, has_codec=gather_codec != "native")
    return GroupPlan(
        name=group.name,
        parameters=tuple(p.current_info for p in shards.parameters),
        layout=shards.layout,
        mesh=group.roles.describe(),
        dtypes=runtime.dtypes,
        roles=Roles(
            transport.name,
            gather_codec,
            _named(contributions.reduce_codec),
            _named(contributions.storage),
            contributions.plugin_lines,
        ),
        reshard_after_forward=group.block_size or group.setup.reshard_after_forward,
        gather_bytes=runtime.path.sent_bytes,
        regather_bytes=(runtime.block or runtime.path).sent_bytes,
        reduce_bytes=runtime.reducer.predicted_bytes(
            _trainable(group, runtime), group.gradients.wire_dtype(runtime)
        ),
        ways=ways,
        transfers=summary(ways, transport),
        notices=all_notices(group.setup.policy, shards.dtype, contributions),
    )


def _trainable(group: ParameterGroup, runtime: Runtime) -> dict[int, Tensor]:
    """Stand-ins for the gradients that a backward will leave, by parameter index."""
    shards = group.shards
    return {
        index: torch.empty(placed.shape, dtype=runtime.dtypes.param, device="meta")
        for index, (sharded, placed) in enumerate(
            zip(shards.parameters, shards.layout.parameters, strict=True)
        )
        if sharded.parameter.requires_grad
    }


def _gather_codec(group: ParameterGroup, runtime: Runtime) -> str:
    if isinstance(runtime.path, ProtocolGather):
        return f"tensor class ({runtime.path.payload_bytes} bytes)"
    return _named(group.contributions.gather_codec)


def _named(part: Named) -> str:
    return f"{part.name}({part.settings})" if part.settings else part.name
