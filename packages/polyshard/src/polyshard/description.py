"""What a sharded model will do, before it does it; and what it did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from torch import nn
from typing_extensions import override

from polyshard.agreement.meeting import reporting
from polyshard.engine.plans import audiences
from polyshard.engine.root import (
    ROOT,
    group_names,
    groups_by_label,
    groups_of,
    preview_names,
    units_below,
)
from polyshard.engine.unit import Unit
from polyshard.group.plan import GroupPlan
from polyshard.group.planner import plan_of
from polyshard.group.transfers import readable
from polyshard.plugins.seams import GroupIdentity
from polyshard.program.meter import Moved

_COLUMNS = ("group", "parameters", "elements", "gather", "reduce", "unsharded", "shard", "frees")


@dataclass(frozen=True)
class Description:
    """The plans of all groups of a model. ``print`` it, or read its numbers.

    Byte counts are this rank's, for one transfer; see :class:`polyshard.group.plan.GroupPlan`.
    """

    groups: tuple[GroupPlan, ...]
    shows_programs: bool = False
    """Whether printing shows what is run, operation by operation."""

    @property
    def gather_bytes(self) -> int:
        """Bytes this rank sends to gather every group once."""
        return sum(g.gather_bytes for g in self.groups)

    @property
    def reduce_bytes(self) -> int:
        """Bytes this rank sends to reduce every group once."""
        return sum(g.reduce_bytes for g in self.groups)

    @property
    def step_bytes(self) -> int:
        """Bytes this rank sends in a training step: twice gathered if freed in between."""
        again = sum(
            g.regather_bytes
            for g in self.groups
            if g.reshard_after_forward and g.unshard_in_backward
        )
        return self.gather_bytes + again + self.reduce_bytes

    @property
    def shard_bytes(self) -> int:
        """Memory of all shards at rest on this rank."""
        return sum(g.shard_bytes for g in self.groups)

    @property
    def kept_bytes(self) -> int:
        """Memory of sums of gradients that codecs keep between backwards of a step, at most."""
        return sum(g.kept_bytes for g in self.groups)

    @override
    def __str__(self) -> str:
        """A table, one row a group, and what differs from the plain case below it."""
        rows = [_row(g) for g in self.groups]
        widths = [max(len(r[i]) for r in (*rows, _COLUMNS)) for i in range(len(_COLUMNS))]
        lines = [_format(_COLUMNS, widths), *(_format(row, widths) for row in rows)]
        lines.append(
            f"a step sends {readable(self.step_bytes)} from this rank; shards rest in "
            f"{readable(self.shard_bytes)}"
        )
        if self.kept_bytes:
            lines.append(
                f"sums of gradients kept between backwards take up to {readable(self.kept_bytes)}"
            )
        lines.extend(_notes(self.groups))
        if self.shows_programs:
            lines.extend(_programs(self.groups))
        return "\n".join(lines)


def _row(plan: GroupPlan) -> tuple[str, ...]:
    return (
        plan.name,
        str(len(plan.parameters)),
        f"{plan.numel:,}",
        readable(plan.gather_bytes),
        readable(plan.reduce_bytes),
        readable(plan.unsharded_bytes),
        readable(plan.shard_bytes),
        _frees(plan.reshard_after_forward),
    )


def _frees(reshard_after_forward: bool | int) -> str:
    if isinstance(reshard_after_forward, bool):
        return "yes" if reshard_after_forward else "no"
    return f"to {reshard_after_forward} ranks"


def _format(cells: tuple[str, ...], widths: list[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in others)])


def _notes(groups: tuple[GroupPlan, ...]) -> list[str]:
    """Facts shared by groups, each said once with the groups it holds for."""
    facts: dict[str, list[str]] = {}
    for plan in groups:
        facts.setdefault(f"mesh: {plan.mesh}", []).append(plan.name)
        facts.setdefault(f"dtypes (rest / compute / reduce): {plan.dtypes}", []).append(plan.name)
        facts.setdefault(plan.roles.summary, []).append(plan.name)
        facts.setdefault(f"transfers: {plan.transfers}", []).append(plan.name)
        for line in (*_plugins(plan), *plan.roles.extras):
            facts.setdefault(line, []).append(plan.name)
        for notice in plan.notices:
            facts.setdefault(notice, []).append(plan.name)
    return [
        fact if len(names) == len(groups) else f"{fact} [{', '.join(names)}]"
        for fact, names in facts.items()
    ]


def _programs(groups: tuple[GroupPlan, ...]) -> Iterator[str]:
    """The programs of every distinct group, once, with the groups that run them."""
    found: dict[tuple[str, ...], list[str]] = {}
    for plan in groups:
        found.setdefault(tuple(map(str, plan.programs)), []).append(plan.name)
    for programs, names in found.items():
        yield ""
        yield f"programs of {', '.join(names)}"
        yield from programs


def _plugins(plan: GroupPlan) -> Iterator[str]:
    return (f"plugin {line}" for line in (*plan.roles.plugins, *plan.roles.watching))


def describe(model: nn.Module, *, programs: bool = False) -> Description:
    """Return the plan of every group of ``model``: parameters, transfers, ranks and plugins.

    A mistake in a plugin that comes to light here is told to the ranks that will wait for this one.

    Args:
        model: the outermost sharded module.
        programs: print what each distinct group runs to gather and to reduce, operation by
            operation: where (``on gather`` is a stream of its own), what it reads and writes. A
            line of dashes stands between what starts work and what joins it.

    Raises:
        SettingError: when nothing of ``model`` is sharded.
    """
    mesh = groups_of(model)[0].roles.mesh
    with reporting(partial(audiences, mesh)):
        return replace(_described(model), shows_programs=programs)


def _described(model: nn.Module) -> Description:
    preview_names(model)
    plans: list[GroupPlan] = []
    fqns = {id(p): name for name, p in model.named_parameters()}
    roots: list[str] = []
    for name, _, unit in units_below(model):
        if unit.is_root is not None:
            frees = unit.reshards_in_training
            plans.extend(plan_of(group, frees=frees) for group in unit.groups)
            continue
        # Before the first forward no root is known: units in no other one will be roots.
        is_root = not any(not root or name.startswith(f"{root}.") for root in roots)
        roots += [name] * is_root
        stays = is_root and unit.reshard_after_forward is None
        plans.extend(_preview(unit, name, not stays and unit.reshards_in_training, fqns))
    return Description(tuple(plans))


def _preview(unit: Unit, name: str, frees: bool, fqns: Mapping[int, str]) -> Iterator[GroupPlan]:
    labels = group_names(name or ROOT, len(unit.groups))
    for group, label in zip(unit.groups, labels, strict=True):
        plan = plan_of(group, frees=frees)
        parameters = tuple(
            replace(info, fqn=fqns.get(id(sharded.parameter), info.fqn))
            for info, sharded in zip(plan.parameters, group.shards.parameters, strict=True)
        )
        yield replace(plan, name=label, parameters=parameters)


_COUNTED = ("group", "gathers", "reductions", "sent", "received", "waited")


@dataclass(frozen=True)
class Stats:
    """What the groups of a model have moved so far on this rank. ``print`` it, or read it."""

    groups: dict[str, Moved]
    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By group, what its codecs say of themselves: an error, a share of saturated values."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that left this rank."""
        return sum(t.sent_bytes for t in self.groups.values())

    @property
    def bytes_received(self) -> int:
        """Bytes that reached this rank."""
        return sum(t.received_bytes for t in self.groups.values())

    @property
    def wait_seconds(self) -> float:
        """How long the host waited for all of it."""
        return sum(t.wait_seconds for t in self.groups.values())

    @override
    def __str__(self) -> str:
        """A table, one row a group, and the sums below it."""
        rows = [_counted(name, traffic) for name, traffic in self.groups.items()]
        widths = [max(len(r[i]) for r in (*rows, _COUNTED)) for i in range(len(_COUNTED))]
        lines = [_format(_COUNTED, widths), *(_format(row, widths) for row in rows)]
        lines.append(
            f"this rank sent {readable(self.bytes_sent)}, received "
            f"{readable(self.bytes_received)} and waited {1e3 * self.wait_seconds:,.1f} ms"
        )
        for group, numbers in self.numbers.items():
            lines.append(f"{group}: {', '.join(f'{n} {v:.4g}' for n, v in numbers.items())}")
        return "\n".join(lines)


def _counted(name: str, traffic: Moved) -> tuple[str, ...]:
    return (
        name,
        str(traffic.gathers),
        str(traffic.reductions),
        readable(traffic.sent_bytes),
        readable(traffic.received_bytes),
        f"{1e3 * traffic.wait_seconds:,.1f} ms",
    )


def stats(model: nn.Module) -> Stats:
    """Bytes, calls and waiting time of every group of ``model`` since it was sharded.

    And what codecs measured, for which it may wait for the device.
    """
    groups = groups_by_label(model)
    numbers = {label: found for label, group in groups.items() if (found := group.numbers())}
    return Stats({label: group.meter.traffic for label, group in groups.items()}, numbers)


def identities_of(model: nn.Module) -> frozenset[GroupIdentity]:
    """The groups of ``model``, as plugins that serve several models tell them apart."""
    return frozenset(group.identity for group in groups_of(model))
