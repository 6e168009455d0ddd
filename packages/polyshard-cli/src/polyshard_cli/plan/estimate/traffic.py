"""What every collective of a step sends, by axis, and who pays: native, or a plugin's codec.

Then bytes around them: sums of micro-batches, casts and copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from polyshard.planning import GroupPlan
from polyshard_cli.plan.dry_run.planning import PlannedGroup
from polyshard_cli.plan.dry_run.probing import Collective, Cost, Probe
from polyshard_cli.plan.request.mesh import MeshSpec


@dataclass(frozen=True)
class Transfer:
    """Transfers of one kind in one step of one rank."""

    unit: str
    """Name of the group whose parameters travel, or of the unit that computes."""
    collective: str
    axis: str
    phase: str
    calls: int
    sent_bytes: int
    """Of all calls: what leaves this rank."""
    payer: str
    """``native``, or the codec."""
    is_counted: bool
    """Whether ``polyshard.stats(model)`` counts it in a run."""
    payload_bytes: int = 0
    """Of all calls: the tensors that are given to the collective, where it is not the engine's."""


def traffic_of(
    groups: Sequence[PlannedGroup], found: Probe, mesh: MeshSpec, micro_batches: int = 1
) -> tuple[Transfer, ...]:
    """Every transfer of a step: the engine's for each group, then the model's own.

    Parameters are gathered in each micro-batch, gradients reduced in the last.
    """
    alone = _left_alone(found)
    made = [t for group in groups for t in _gathers(group, group.unit in alone, mesh)]
    for name, cost in (("", found.root), *found.units.items()):
        made += _own(name, cost, mesh)
    made = [_repeated(transfer, micro_batches) for transfer in made]
    made += [t for group in groups for t in _sums(group, mesh, widened=micro_batches > 1)]
    return tuple(made)


def _repeated(one: Transfer, times: int) -> Transfer:
    sent, payload = times * one.sent_bytes, times * one.payload_bytes
    return replace(one, calls=times * one.calls, sent_bytes=sent, payload_bytes=payload)


def _left_alone(found: Probe) -> set[str]:
    """Units that a backward does not gather: no gradient reaches them, nor the unit after them.

    While a unit's backward runs, the one before it in the order of forwards is gathered, whether
    gradients will reach it or not.
    """
    names = [*found.units, ""]
    reached = [cost.has_backward for cost in (*found.units.values(), found.root)]
    pairs = zip(names[:-1], reached[:-1], reached[1:], strict=True)
    return {name for name, own, following in pairs if not (own or following)}


def _gathers(group: PlannedGroup, is_alone: bool, mesh: MeshSpec) -> Iterator[Transfer]:
    plan, axis = group.plan, mesh.name("shard")
    if plan.layout.world_size > 1:
        payer = "native" if plan.payloads.gather is None else plan.roles.gather_codec
        sent = plan.gather_bytes
        yield Transfer(plan.name, "all-gather", axis, "forward", 1, sent, payer, True)
        if plan.reshard_after_forward and not is_alone:
            again = plan.regather_bytes
            payer = payer if plan.regather is plan.gather else "native"
            yield Transfer(plan.name, "all-gather", axis, "backward", 1, again, payer, True)


def _sums(group: PlannedGroup, mesh: MeshSpec, *, widened: bool) -> Iterator[Transfer]:
    plan = group.plan
    if not any(p.trainable for p in group.parameters):
        return
    if plan.layout.world_size > 1:
        codec = plan.roles.exclusive["reduce codec"]
        payer = "native" if plan.payloads.reduce is None else codec
        sent = plan.accumulated_reduce_bytes if widened else plan.reduce_bytes
        axis = mesh.name("shard")
        yield Transfer(plan.name, "reduce-scatter", axis, "backward", 1, sent, payer, True)
    replicas = mesh.size("replicate")
    if replicas > 1:
        yield _replicas(group, mesh.name("replicate"), replicas)


def _replicas(group: PlannedGroup, axis: str, ranks: int) -> Transfer:
    """The sum over replicas: of the reduced shard, whole, or of a codec's payload."""
    plan = group.plan
    payload = plan.reduction.traffic.replicas
    if plan.payloads.replicas is not None:
        sent = (ranks - 1) * payload
        codec = plan.roles.exclusive["reduce codec"]
        return Transfer(plan.name, "all-gather", axis, "backward", 1, sent, codec, False, payload)
    sent = Collective("all-reduce", ranks, payload).sent_bytes
    return Transfer(plan.name, "all-reduce", axis, "backward", 1, sent, "native", False, payload)


def _own(name: str, cost: Cost, mesh: MeshSpec) -> Iterator[Transfer]:
    axes = {axis.size: axis.name for axis in mesh.axes}
    axes |= {mesh.size("tensor"): mesh.name("tensor")}
    for phase, account in (("forward", cost.forward), ("backward", cost.backward)):
        for what, calls in Counter(account.collectives).items():
            yield Transfer(
                unit=name or "(root)",
                collective=what.kind,
                axis=axes.get(what.ranks, f"{what.ranks} ranks"),
                phase=phase,
                calls=calls,
                sent_bytes=calls * what.sent_bytes,
                payer="native",
                is_counted=False,
                payload_bytes=calls * what.payload_bytes,
            )


def accumulated_bytes(plan: GroupPlan) -> int:
    """Of unsharded gradients that wait for the last micro-batch, in the reduce dtype."""
    return sum(
        placed.numel * plan.dtypes.reduce.itemsize
        for placed, info in zip(plan.layout.parameters, plan.parameters, strict=True)
        if info.requires_grad
    )


def copied_by_gathers(plan: GroupPlan) -> int:
    """Bytes read and written to cast a shard, and to bring what was packed where it belongs.

    None with a codec, which reads and writes everything itself.
    """
    if plan.payloads.gather is not None:
        return 0
    layout, param, orig = plan.layout, plan.dtypes.param, plan.dtypes.orig
    cast = layout.shard_numel * (orig.itemsize + param.itemsize) if param != orig else 0
    return cast + 2 * layout.world_size * layout.staged_numel * param.itemsize


def copied_by_reductions(plan: GroupPlan) -> int:
    """Bytes read and written to pack gradients."""
    if plan.payloads.reduce is not None:
        return 0
    layout = plan.layout
    return 2 * layout.world_size * layout.reduced_numel * plan.dtypes.param.itemsize


def native_gather_bytes(plan: GroupPlan) -> int:
    """Bytes that a gather would send without a codec, at most."""
    return (plan.layout.world_size - 1) * plan.layout.shard_numel * plan.dtypes.param.itemsize
