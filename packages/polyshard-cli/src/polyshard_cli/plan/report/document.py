"""The plan as data: frozen, and the same as JSON.

``docs/reference/plan.md`` says what each field means; a field that changes its meaning, or goes,
raises :data:`SCHEMA`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from polyshard.__about__ import __version__
from polyshard_cli.plan.dry_run.planning import PlannedGroup, PlannedParameter
from polyshard_cli.plan.estimate.memory import Memory
from polyshard_cli.plan.estimate.timing import Step, Timing
from polyshard_cli.plan.estimate.traffic import Transfer
from polyshard_cli.plan.report.advice import Notice, advice_for, pattern
from polyshard_cli.plan.request.mesh import MeshSpec

SCHEMA = 1


@dataclass(frozen=True)
class ModelFacts:
    """The model, and what is done with it."""

    name: str
    parameters: int
    """Elements of all parameters, whole."""
    trainable: int
    units: int
    batch: int
    """Sequences of a micro-batch on each data-parallel rank."""
    sequence: int
    optimizer: str
    rank: int
    """The rank that all bytes are of."""
    accumulate: int = 1
    """Micro-batches a step."""

    @property
    def step(self) -> str:
        """In words: what a rank computes in one."""
        times = f"{self.accumulate} x " if self.accumulate > 1 else ""
        return f"{times}{self.batch} x {self.sequence:,} tokens"


@dataclass(frozen=True)
class MachineFacts:
    """What time is estimated for."""

    name: str
    backend: str
    sources: tuple[str, ...]
    memory_bytes: int = 0
    """Of a rank's device; 0 where that is not known."""


@dataclass(frozen=True)
class GroupFacts:
    """Parameter groups that are alike; bytes are of one of them, on the planned rank."""

    name: str
    count: int
    names: tuple[str, ...]
    parameters: tuple[PlannedParameter, ...]
    mesh: str
    dtypes: str
    claims: Mapping[str, str]
    """What takes each exclusive role: the engine's own part, or a plugin's."""
    transport: str
    plugins: tuple[str, ...]
    reshard_after_forward: bool | int
    gather_bytes: int
    regather_bytes: int
    reduce_bytes: int
    shard_bytes: int
    unsharded_bytes: int
    padding_bytes: int
    """Of the shard: what no parameter needs."""


@dataclass(frozen=True)
class Document:
    """Everything ``polyshard plan`` says."""

    schema: int
    polyshard: str
    torch: str
    model: ModelFacts
    mesh: MeshSpec
    machine: MachineFacts
    groups: tuple[GroupFacts, ...]
    memory: Memory
    traffic: tuple[Transfer, ...]
    timing: Timing | None
    """``None`` where the model did not run, so that nothing is known of what it computes."""
    notices: tuple[Notice, ...]

    def to_json(self) -> str:
        """As ``--json`` prints it."""
        plain = asdict(self)
        for phase, given in zip(plain["memory"]["phases"], self.memory.phases, strict=True):
            phase["total"] = given.total
        return json.dumps(plain, indent=2)

    @property
    def counted_bytes(self) -> int:
        """What ``polyshard.stats(model).bytes_sent`` grows by in a step of the planned rank."""
        return sum(t.sent_bytes for t in self.traffic if t.is_counted)


def document_of(
    step: Step,
    backend: str,
    *,
    name: str,
    optimizer: str,
    rank: int,
    batch: int = 0,
    sequence: int = 0,
    accumulate: int = 1,
) -> Document:
    """``step`` for a reader; what is done with the model, as :class:`ModelFacts` says it."""
    machine, parameters = step.machine, [p for group in step.groups for p in group.parameters]
    return Document(
        schema=SCHEMA,
        polyshard=__version__,
        torch=torch.__version__,
        model=ModelFacts(
            name=name,
            parameters=sum(p.elements for p in parameters),
            trainable=sum(p.elements for p in parameters if p.trainable),
            units=len({group.unit for group in step.groups}),
            batch=batch,
            sequence=sequence,
            optimizer=optimizer,
            rank=rank,
            accumulate=accumulate,
        ),
        mesh=step.mesh,
        machine=MachineFacts(machine.name, backend, machine.sources, machine.memory_bytes),
        groups=_folded_groups(step.groups),
        memory=step.memory,
        traffic=_folded(step.traffic),
        timing=step.timing,
        notices=advice_for(step),
    )


def _folded_groups(groups: Sequence[PlannedGroup]) -> tuple[GroupFacts, ...]:
    """One entry for all groups that differ in nothing but the numbers in their names."""
    found: dict[str, GroupFacts] = {}
    for group in groups:
        facts = _facts(group)
        key = repr(replace(facts, names=()))
        names = (*found[key].names, *facts.names) if key in found else facts.names
        found[key] = replace(facts, names=names, count=len(names))
    return tuple(found.values())


def _facts(group: PlannedGroup) -> GroupFacts:
    plan = group.plan
    needed = sum(p.local_elements for p in group.parameters) * plan.layout.itemsize
    return GroupFacts(
        name=pattern(plan.name),
        count=1,
        names=(plan.name,),
        parameters=tuple(replace(p, name=pattern(p.name)) for p in group.parameters),
        mesh=plan.mesh.partition(" ")[2],  # without its device
        dtypes=str(plan.dtypes),
        claims=dict(plan.roles.exclusive),
        transport=plan.roles.transport,
        plugins=plan.roles.plugins,
        reshard_after_forward=plan.reshard_after_forward,
        gather_bytes=plan.gather_bytes,
        regather_bytes=plan.regather_bytes,
        reduce_bytes=plan.reduce_bytes,
        shard_bytes=plan.shard_bytes,
        unsharded_bytes=plan.unsharded_bytes,
        padding_bytes=plan.shard_bytes - needed,
    )


def _folded(traffic: Sequence[Transfer]) -> tuple[Transfer, ...]:
    """Transfers of groups that are alike, added up under one name."""
    found: dict[tuple[object, ...], list[Transfer]] = {}
    for one in traffic:
        key = (pattern(one.unit), one.collective, one.axis, one.phase, one.payer, one.is_counted)
        found.setdefault(key, []).append(one)
    return tuple(
        replace(
            some[0],
            unit=pattern(some[0].unit),
            calls=sum(one.calls for one in some),
            sent_bytes=sum(one.sent_bytes for one in some),
            payload_bytes=sum(one.payload_bytes for one in some),
        )
        for some in found.values()
    )
