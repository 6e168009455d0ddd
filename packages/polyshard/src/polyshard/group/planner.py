"""Makes the plan of a group: who does what, how each parameter travels, bytes to the last one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyshard.composition.roles import GATHER_CODEC
from polyshard.exchange.tensor_protocol import ProtocolGather
from polyshard.group.dtypes import all_notices
from polyshard.group.group import ParameterGroup
from polyshard.group.plan import GroupPlan, Payloads, Roles, Sharded
from polyshard.group.runtime import Runtime
from polyshard.group.transfers import summary, ways_of
from polyshard.seams import Named


def plan_of(group: ParameterGroup) -> GroupPlan:
    """What ranks compare and ``describe()`` shows: what the runtime of ``group`` carries out."""
    if group.is_sharded and group.shards.speaks_anew():  # no hook tells of that
        group.adopt_replaced()
    runtime = group.prepare()
    group.sync_requires_grad(runtime)
    contributions, shards, transport = group.contributions, group.shards, group.transport
    gather_codec = _gather_codec(group, runtime)
    ways = ways_of(shards.layout, transport, has_codec=runtime.path.payload_bytes is not None)
    return GroupPlan(
        name=group.name,
        parameters=tuple(p.current_info for p in shards.parameters),
        layout=shards.layout,
        mesh=group.roles.describe(),
        dtypes=runtime.dtypes,
        roles=_roles(group, gather_codec),
        reshard_after_forward=group.block_size or group.setup.reshard_after_forward,
        gather_bytes=runtime.path.sent_bytes,
        regather_bytes=(runtime.block or runtime.path).sent_bytes,
        reduce_bytes=runtime.reducer.predicted_bytes(
            _trainable(group, runtime), group.gradients.wire_dtype(runtime)
        ),
        ways=ways,
        transfers=summary(ways, transport),
        sharded=tuple(_sharded(group, index) for index in range(len(shards.parameters))),
        payloads=Payloads(runtime.path.payload_bytes, *runtime.reducer.payload_bytes),
        notices=all_notices(group.setup.policy, shards.dtype, contributions),
        kept_bytes=runtime.reducer.kept_bytes,
    )


def _roles(group: ParameterGroup, gather_codec: str) -> Roles:
    contributions, parameters = group.contributions, group.info().parameters
    return Roles(
        transport=group.transport.name,
        exclusive={
            role.name: gather_codec if role is GATHER_CODEC else _nested(layers)
            for role, layers in contributions.layers.items()
        },
        plugins=contributions.lines.compared,
        watching=contributions.lines.local,
        constraints=tuple(
            f"{_named(c)}: {', '.join(f'{p.fqn} {c.block_elements(p)}' for p in parameters)}"
            for c in contributions.constraints
        ),
        adapters=tuple(map(_named, contributions.adapters)),
    )


def _sharded(group: ParameterGroup, index: int) -> Sharded:
    parameter = group.shards.parameters[index]
    layers = group.setup.stack.onion.layers_of(parameter.extensions)
    flat_shape = group.shards.layout.parameters[index].shape
    told = "" if parameter.told is None else str(parameter.told)
    return Sharded(str(tuple(parameter.spec.placements)), flat_shape, layers, told)


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
    return _nested(group.contributions.layers[GATHER_CODEC])


def _nested(layers: Sequence[Named]) -> str:
    """What takes a role, from outside to inside."""
    return " around ".join(map(_named, layers))


def _named(part: Named) -> str:
    return f"{part.name}({part.settings})" if part.settings else part.name
