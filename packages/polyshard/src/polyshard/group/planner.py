"""Makes the plan of a group: which part takes each role, how each parameter travels, all bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polyshard.group.dtypes import all_notices
from polyshard.group.group import ParameterGroup
from polyshard.group.plan import GroupPlan, Payloads, Roles
from polyshard.group.transfers import summary, ways_of
from polyshard.params.parameter import ShardedParameter
from polyshard.plugins.contributions import ADAPTERS, CONSTRAINTS, GATHER_CODEC, Role
from polyshard.plugins.seams import Named
from polyshard.program.ops import ProgramPlan
from polyshard.program.tensor_protocol import ProtocolGather
from polyshard.program.unshard import Gather


def plan_of(group: ParameterGroup, *, frees: bool) -> GroupPlan:
    """What ranks compare and ``describe()`` shows: what the programs of ``group`` carry out.

    ``frees``: whether a training forward of its unit frees parameters, where no block keeps them.
    """
    if group.is_sharded and group.shards.speaks_anew():  # no hook tells of that
        group.adopt_replaced()
    generation = group.prepare()
    group.sync_requires_grad(generation)
    gather, reducer = generation.gather, generation.reducer
    wire, sums = generation.wire, generation.dtypes.reduce
    reductions = {dtype: reduction_of(group, dtype) for dtype in dict.fromkeys((wire, sums))}
    contributions, shards, transport = group.contributions, group.shards, group.transport
    gather_codec = _gather_codec(group, gather)
    ways = ways_of(shards.layout, transport, has_codec=gather.payload_bytes is not None)
    return GroupPlan(
        name=group.name,
        parameters=tuple(p.current_info for p in shards.parameters),
        layout=shards.layout,
        mesh=group.roles.describe(),
        dtypes=generation.dtypes,
        roles=_roles(group, gather_codec),
        reshard_after_forward=group.block_size or frees,
        programs=(*(gathered.planned() for gathered in generation.gathers), reductions[wire]),
        ways=ways,
        transfers=summary(ways, transport),
        forms=tuple(_form(group, parameter) for parameter in shards.parameters),
        payloads=Payloads(gather.payload_bytes, *reducer.payload_bytes),
        notices=all_notices(group.policy, shards.dtype, contributions),
        accumulated_reduce_bytes=reductions[sums].traffic.sent,
        kept_bytes=reducer.kept_bytes,
        unshard_in_backward=group.unshard_in_backward,
        gather_kept_bytes=gather.kept_bytes,
    )


def _roles(group: ParameterGroup, gather_codec: str) -> Roles:
    contributions, parameters = group.contributions, group.info().parameters
    return Roles(
        transport=group.transport.name,
        exclusive={
            role.name: gather_codec if role is GATHER_CODEC else _nested(contributions.all(role))
            for role in contributions.answers
            if isinstance(role, Role)
        },
        plugins=tuple(m.line for m in contributions.members if not m.is_local),
        watching=tuple(m.line for m in contributions.members if m.is_local),
        constraints=tuple(
            f"{_named(c)}: {', '.join(f'{p.fqn} {c.block_elements(p)}' for p in parameters)}"
            for c in contributions.all(CONSTRAINTS)
        ),
        adapters=tuple(map(_named, contributions.all(ADAPTERS))),
    )


def _form(group: ParameterGroup, parameter: ShardedParameter) -> str:
    """Placements, the plugins that transform it, and what it says of the dtype of its gradients."""
    layers = group.stack.transforms.layers_of(parameter.extensions)
    by = f" flattened by {', '.join(layers)}" if layers else ""
    told = "" if parameter.told is None else f" gradients {parameter.told}"
    return f"{tuple(parameter.spec.placements)}{by}{told}"


def reduction_of(group: ParameterGroup, wire: torch.dtype) -> ProgramPlan:
    """The reduction of all trainable parameters in ``wire``, at the end of an iteration."""
    generation = group.prepare()
    trainable = [
        index
        for index, sharded in enumerate(group.shards.parameters)
        if sharded.parameter.requires_grad
    ]
    program = generation.reducer.planned(trainable, wire)
    return program.planned(frozenset(trainable))


def _gather_codec(group: ParameterGroup, gather: Gather) -> str:
    if isinstance(gather, ProtocolGather):
        return f"tensor class ({gather.payload_bytes} bytes)"
    return _nested(group.contributions.all(GATHER_CODEC))


def _nested(layers: Sequence[Named]) -> str:
    """What takes a role, from outside to inside."""
    return " around ".join(map(_named, layers))


def _named(part: Named) -> str:
    return f"{part.name}({part.settings})" if part.settings else part.name
