"""Time of a step on a machine: compute, and the links that gathers and reductions share.

[Note: time of a step]
A unit computes for as long as its kernels take: matrix products what the machine reaches at their
operations for each byte, others the time of their bytes. An accelerator takes no shorter than
launching them does; a CPU launches and computes in turn. Collectives of its own hold a unit up. The
next unit is gathered meanwhile, and the last one's gradients are reduced. Transfers over one axis
share its links: they follow one another in the order in which they are started. Sums over replicas
have the links of another axis. What does not fit beside compute is *exposed*, and so is what
transfers take from it where the same cores do both.

[Note: what plugins add]
Codecs read and write memory that compute would use. Transfers between a device and another tier
have a lane of their own, which hides behind compute as far as the machine can do both; a tier
called ``disk`` counts as the host. Where parameters rest on the host, the optimizer steps there.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal

from polyshard.hardware import ring_bandwidth, rings
from polyshard.planning import GroupPlan
from polyshard_cli.plan.dry_run.planning import PlannedGroup
from polyshard_cli.plan.dry_run.probing import Account, Cost, Kernel, Probe
from polyshard_cli.plan.estimate.machines import Link, Machine
from polyshard_cli.plan.estimate.memory import STATES, Memory, memory_of, trainable_bytes
from polyshard_cli.plan.estimate.traffic import (
    Transfer,
    accumulated_bytes,
    copied_by_gathers,
    copied_by_reductions,
    traffic_of,
)
from polyshard_cli.plan.request.mesh import MeshSpec
from polyshard_cli.plan.request.settings import OptimizerName


def link_of(axis: str, mesh: MeshSpec, machine: Machine) -> Link:
    """What ranks of ``axis`` talk over: within a host if all of its ranks are on one.

    NCCL's rings leave a host by the network card of each rank that the axis has there. gloo's
    ranks send to each other directly.
    """
    ranks, hosts = _place(axis, mesh, machine)
    if hosts == 1:
        return machine.inside
    together = ranks if machine.backend == "nccl" else hosts
    inside, between = machine.inside.bytes_per_second, machine.between.bytes_per_second
    rate = ring_bandwidth(together, hosts, inside, between)
    return replace(machine.between, bytes_per_second=rate)


def seconds_of_transfer(transfer: Transfer, mesh: MeshSpec, machine: Machine) -> float:
    """Of all calls of ``transfer``, alone on its links."""
    ranks, hosts = _place(transfer.axis, mesh, machine)
    nbytes, calls = transfer.sent_bytes, transfer.calls
    if machine.protocols:
        speeds = machine.inside.bytes_per_second, machine.between.bytes_per_second
        ways = 2 if transfer.collective == "all-reduce" else 1
        found = rings(ranks, hosts, *speeds, machine.protocols)
        return min(ring.seconds(nbytes, calls=calls, ways=ways) for ring in found)
    own = machine.transfer_seconds
    if not transfer.is_counted:  # a ring of fewer ranks has fewer turns
        own = machine.collective_seconds * (ranks - 1)
    link = link_of(transfer.axis, mesh, machine)
    seconds = calls * (own or link.latency_seconds) + nbytes / link.bytes_per_second
    if transfer.collective in ("reduce-scatter", "all-reduce"):  # reads two, and writes one
        seconds += 3 * nbytes / machine.memory_bytes_per_second
    return seconds


def _place(axis: str, mesh: MeshSpec, machine: Machine) -> tuple[int, int]:
    """Ranks of ``axis``, and hosts that they are on; two on one for what is no axis of the mesh."""
    inner = 1
    for found in reversed(mesh.axes):
        if found.name == axis:
            on_host = min(found.size, max(1, machine.ranks_per_host // inner))
            return found.size, math.ceil(found.size / on_host)
        inner *= found.size
    return 2, 1


Lane = Literal["compute", "gathers", "reductions"]
LANES: tuple[Lane, ...] = ("compute", "gathers", "reductions")
TENSOR = "collectives of tensor parallelism"
SLOWED = "transfers that take from compute"


@dataclass(frozen=True)
class Span:
    """One unit on one lane, in seconds from the start of the step."""

    lane: Lane
    unit: str
    """Empty for the root."""
    phase: str
    """``forward``, ``backward``, ``optimizer``, or ``plugins``: codes and other tiers."""
    start: float
    end: float


@dataclass(frozen=True)
class Timing:
    """Seconds of one step."""

    step_seconds: float
    compute_seconds: float
    """Forward and backward, with collectives of the model's own."""
    optimizer_seconds: float
    gather_seconds: float
    reduce_seconds: float
    """Of reductions, sums over replicas included."""
    exposed: tuple[tuple[str, float], ...]
    """What compute waits for: words, and seconds."""
    spans: tuple[Span, ...] = ()
    """Which unit is on which lane when."""


@dataclass(frozen=True)
class Step:
    """A step of one rank, and what it needs: bytes, memory, and time on a machine."""

    groups: tuple[PlannedGroup, ...]
    found: Probe
    """What units cost in one micro-batch."""
    machine: Machine
    mesh: MeshSpec
    micro_batches: int
    traffic: tuple[Transfer, ...]
    """Of the whole step."""
    memory: Memory
    timing: Timing | None = None
    """``None`` where the model did not run."""


def step_of(
    groups: tuple[PlannedGroup, ...],
    found: Probe,
    machine: Machine,
    mesh: MeshSpec,
    optimizer: OptimizerName,
    tiers: Mapping[str, Any],
    micro_batches: int = 1,
) -> Step:
    """What follows from a plan and a probe: arithmetic alone."""
    traffic = traffic_of(groups, found, mesh, micro_batches)
    memory = memory_of(groups, found, optimizer, tiers, micro_batches)
    step = Step(groups, found, machine, mesh, micro_batches, traffic, memory)
    if found.problem:
        return step
    return replace(step, timing=with_overheads(time_of(step, optimizer), step, tiers, optimizer))


def time_of(step: Step, optimizer: OptimizerName) -> Timing:
    """The time of a step, without what plugins add."""
    machine = step.machine
    rate = machine.optimizer_bytes_per_second or machine.memory_bytes_per_second
    # The optimizer reads gradients, reads and writes parameters and state.
    passing = trainable_bytes(step.groups) * (3 + 2 * STATES[optimizer])
    return _Lanes(step).timing(passing / rate)


@dataclass
class _Flight:
    """A transfer that is under way, or waits for those before it."""

    lane: Lane
    axis: str
    unit: str
    phase: str
    start: float
    end: float
    after: _Flight | None
    """What it needs the result of."""


@dataclass
class _Links:
    """Transfers in the order in which they were started."""

    flights: list[_Flight] = field(default_factory=list)
    _landed: int = 0
    """How many of them, from the first on, nothing can hold up any more."""

    def start(
        self, lane: Lane, unit: str, phase: str, now: float, parts: Mapping[str, float]
    ) -> list[_Flight]:
        """Start transfers of so many seconds, by axis, each of what the one before made."""
        made: list[_Flight] = []
        for axis, seconds in parts.items():
            after = made[-1] if made else None
            begin = _earliest(now, axis, after, self.flights[self._landed :])
            made.append(_Flight(lane, axis, unit, phase, begin, begin + seconds, after))
            self.flights.append(made[-1])
        return made

    def hold_up(self, begin: float, seconds: float, share: float) -> float:
        """Compute for so long beside transfers; seconds by which these hold that up.

        What a transfer takes from compute, compute takes from the transfer: a ``share`` of the time
        in which both run. Those that wait for the transfer start later.
        """
        taken = 0.0
        while self._landed < len(self.flights) and self.flights[self._landed].end <= begin:
            self._landed += 1
        late: list[_Flight] = []
        for flight in self.flights[self._landed :]:
            beside = min(flight.end, begin + seconds) - max(flight.start, begin)
            lost = share * max(beside, 0.0)
            length = flight.end - flight.start + lost
            flight.start = _earliest(flight.start, flight.axis, flight.after, late)
            flight.end = flight.start + length
            late.append(flight)
            taken += lost
        return taken


def _earliest(now: float, axis: str, after: _Flight | None, flights: Iterable[_Flight]) -> float:
    """When another transfer may start: behind ``after``, and what is before it on its axis."""
    ends = [f.end for f in flights if f.axis == axis or f is after]
    return max([now, *ends])


class _Lanes:
    """One step in turn: what computes, what is under way, and what is waited for."""

    def __init__(self, step: Step) -> None:
        groups, found = step.groups, step.found
        self._found, self._machine, self._mesh = found, step.machine, step.mesh
        self._passes = step.micro_batches
        self._sums: Counter[str] = Counter()
        for group in groups:
            self._sums[group.unit] += accumulated_bytes(group.plan)
        self._dtype = {g.unit: str(g.plan.dtypes.param).removeprefix("torch.") for g in groups}
        units = list(dict.fromkeys(g.unit for g in groups))
        self._names = [n for n in found.units if n in units] or [n for n in units if n]
        self._moved: dict[tuple[Lane, str, str], defaultdict[str, float]] = {}
        """Of gathers and reductions, by lane, unit and phase: seconds by axis."""
        self._own: defaultdict[tuple[str, str], float] = defaultdict(float)
        """By unit and phase: seconds of the model's own collectives."""
        self._busy: dict[tuple[int, str], float] = {}
        """Of accounts, which units that are alike share."""
        self._add_transfers(step)
        for group in groups:
            self._add_copies(group)
        self._clock = 0.0
        self._links = _Links()
        self._spans: list[Span] = []
        self._exposed: defaultdict[str, float] = defaultdict(float)

    def _add_transfers(self, step: Step) -> None:
        """Time of each transfer alone; of gathers and of the model's own in one micro-batch."""
        unit_of = {group.plan.name: group.unit for group in step.groups}
        for transfer in step.traffic:
            seconds = seconds_of_transfer(transfer, self._mesh, self._machine)
            if not transfer.is_counted and transfer.axis == self._mesh.name("tensor"):
                name = "" if transfer.unit == "(root)" else transfer.unit
                self._own[name, transfer.phase] += seconds / self._passes
                continue
            key: tuple[Lane, str, str]
            key = ("reductions", unit_of.get(transfer.unit, ""), "backward")
            if transfer.collective == "all-gather" and transfer.is_counted:
                key = ("gathers", key[1], transfer.phase)
                seconds /= self._passes
            self._moved.setdefault(key, defaultdict(float))[transfer.axis] += seconds

    def _add_copies(self, group: PlannedGroup) -> None:
        """To cast and pack what is sent, and to unpack what came, takes from the same lanes."""
        if group.plan.layout.world_size == 1:
            return
        copied: dict[Lane, int] = {
            "gathers": copied_by_gathers(group.plan),
            "reductions": copied_by_reductions(group.plan),
        }
        in_place = ("gathers", "backward") if group.plan.regather is not group.plan.gather else None
        for lane, phase in product(copied, ("forward", "backward")):
            if (lane, phase) == in_place:  # a block moves slices of the unsharded memory itself
                continue
            if parts := self._moved.get((lane, group.unit, phase)):
                seconds = copied[lane] / self._machine.memory_bytes_per_second
                parts[self._mesh.name("shard")] += seconds

    def timing(self, optimizer_seconds: float) -> Timing:
        """Run it, once."""
        for index in range(self._passes):
            self._micro_batch(index)
        last = [flight for flight in self._links.flights if flight.lane == "reductions"]
        self._wait(last, "last reductions")
        if tensor := self._passes * sum(self._own.values()):
            self._exposed[TENSOR] = tensor
        end = self._clock + optimizer_seconds
        self._span("", "optimizer", self._clock, end)
        for f in self._links.flights:
            self._span(f.unit, f.phase, f.start, f.end, f.lane)
        spans = sorted(self._spans, key=lambda s: (s.start, LANES.index(s.lane)))
        computing = sum(
            self._compute(name, account, phase)
            for name, cost in [("", self._found.root), *self._found.units.items()]
            for account, phase in ((cost.forward, "forward"), (cost.backward, "backward"))
        )
        return Timing(
            step_seconds=end,
            compute_seconds=self._passes * computing,
            optimizer_seconds=optimizer_seconds,
            gather_seconds=self._passes * self._seconds_of("gathers"),
            reduce_seconds=self._seconds_of("reductions"),
            exposed=tuple(self._exposed.items()),
            spans=tuple(spans),
        )

    def _seconds_of(self, lane: Lane) -> float:
        return sum(sum(parts.values()) for key, parts in self._moved.items() if key[0] == lane)

    def _micro_batch(self, index: int) -> None:
        """One forward and backward; the last one's gradients are reduced."""
        self._wait(self._start("gathers", "", "forward"), "first gather of the root")
        self._pass("forward", self._names)
        self._run("", self._found.root.forward, "forward")
        self._wait(self._start("gathers", "", "backward"), "gathers in backward")
        self._run("", self._found.root.backward, "backward")
        self._pass("backward", self._names[::-1], index)
        self._leave("", index)

    def _pass(self, phase: str, names: Sequence[str], index: int = 0) -> None:
        """Units one after the other; the next is gathered while one computes."""
        coming = self._start("gathers", names[0], phase) if names else []
        for place, name in enumerate(names):
            self._wait(coming, f"gathers in {phase}")
            if place + 1 < len(names):
                coming = self._start("gathers", names[place + 1], phase)
            cost = self._found.units.get(name, Cost())
            self._run(name, cost.forward if phase == "forward" else cost.backward, phase)
            if phase == "backward":
                self._leave(name, index)

    def _leave(self, name: str, index: int) -> None:
        """Add the gradients of a unit to those of earlier micro-batches; reduce the sum."""
        if index:  # reads two, and writes one
            start = self._clock
            self._clock += 3 * self._sums[name] / self._machine.memory_bytes_per_second
            self._span(name, "backward", start, self._clock)
        if index + 1 == self._passes:
            self._start("reductions", name, "backward")

    def _start(self, lane: Lane, name: str, phase: str) -> list[_Flight]:
        """Start to gather or to reduce a unit."""
        parts: Mapping[str, float] = self._moved.get((lane, name, phase), {})
        return self._links.start(lane, name, phase, self._clock, parts)

    def _run(self, name: str, account: Account, phase: str) -> None:
        """Compute a unit."""
        seconds, start = self._compute(name, account, phase), self._clock
        taken = self._links.hold_up(start, seconds, 1.0 - self._machine.overlap)
        self._clock += seconds + taken
        self._span(name, phase, start, self._clock)
        if taken:
            self._exposed[SLOWED] += taken

    def _wait(self, flights: Sequence[_Flight], what: str) -> None:
        until = max((flight.end for flight in flights), default=0.0)
        if until > self._clock:
            self._exposed[what] += until - self._clock
            self._clock = until

    def _span(
        self, unit: str, phase: str, start: float, end: float, lane: Lane = "compute"
    ) -> None:
        """What takes no time has none."""
        if end > start:
            self._spans.append(Span(lane, unit, phase, start, end))

    def _compute(self, name: str, account: Account, phase: str) -> float:
        machine, dtype = self._machine, self._dtype.get(name, "float32")
        kernels, key = account.kernels, (id(account), dtype)
        if key not in self._busy:
            self._busy[key] = sum(n * seconds_of(k, dtype, machine) for k, n in kernels.items())
        busy, launched = self._busy[key], kernels.total() * machine.operation_seconds
        launched += account.divided * machine.divided_seconds
        computing = max(busy, launched) if machine.is_ahead else busy + launched
        return computing + self._own[name, phase]


def seconds_of(kernel: Kernel, dtype: str, machine: Machine) -> float:
    """One kernel, alone: as long as its product or its memory takes, whichever is more."""
    moved = kernel.touched_bytes / machine.memory_bytes_per_second
    if not kernel.flops:
        return moved
    roof = machine.products.get(dtype)
    if roof is not None and kernel.touched_bytes:
        return kernel.flops / roof.flops_per_second(kernel.flops / kernel.touched_bytes)
    peak = machine.flops_per_second.get(dtype) or min(machine.flops_per_second.values())
    return max(kernel.flops / (peak * machine.efficiency), moved)


def with_overheads(
    timing: Timing, step: Step, tiers: Mapping[str, Any], optimizer: OptimizerName
) -> Timing:
    """``timing`` of ``step``, and what codecs and tiers add. See [Note: what plugins add]."""
    groups, passes, machine = step.groups, step.micro_batches, step.machine
    longer = _optimizer(timing, trainable_bytes(groups), tiers, machine, STATES[optimizer])
    rate = machine.codec_bytes_per_second or machine.memory_bytes_per_second
    added = {
        "encoding and decoding": sum(coded_bytes(g.plan, passes) for g in groups) / rate,
        "shards from and to other tiers": _exposed(
            sum(_staged_bytes(group, tiers, passes) for group in groups)
            / machine.host_bytes_per_second,
            timing.compute_seconds,
            machine,
        ),
    }
    waits = tuple((what, seconds) for what, seconds in added.items() if seconds)
    others = tuple(span for span in timing.spans if span.phase != "optimizer")
    start, stepped = timing.step_seconds - timing.optimizer_seconds, timing.step_seconds + longer
    end = stepped + sum(added.values())
    last = (
        Span("compute", "", "optimizer", start, stepped),
        Span("compute", "", "plugins", stepped, end),
    )
    return replace(
        timing,
        step_seconds=end,
        optimizer_seconds=timing.optimizer_seconds + longer,
        exposed=(*timing.exposed, *waits),
        spans=(*others, *(span for span in last if span.end > span.start)),
    )


def _exposed(seconds: float, beside: float, machine: Machine) -> float:
    """What is left of transfers that run beside so many seconds of work."""
    return seconds - machine.overlap * min(seconds, beside)


def _optimizer(
    timing: Timing, nbytes: int, tiers: Mapping[str, Any], machine: Machine, states: int
) -> float:
    """Seconds that the optimizer takes longer, whose parameters take so many bytes."""
    if tiers["params"] != "device":
        if not machine.is_ahead:  # the host is the device
            return 0.0
        on_host = nbytes * (3 + 2 * states) / machine.host_bytes_per_second
        return max(0.0, on_host - timing.optimizer_seconds)
    if tiers["optimizer"] == "device":
        return 0.0
    # State comes and goes at the same time, each on its direction of the link, if there is one.
    turns = 1 if machine.is_ahead else 2
    passing = turns * states * nbytes * tiers["fraction"] / machine.host_bytes_per_second
    return _exposed(passing, timing.optimizer_seconds, machine)


def _staged_bytes(group: PlannedGroup, tiers: Mapping[str, Any], passes: int) -> int:
    """Shards to the device for each gather, and those of gradients from it, once."""
    plan = group.plan
    gathers = passes * (1 + (plan.reshard_after_forward is True))
    comes = gathers * plan.shard_bytes if tiers["params"] != "device" else 0
    goes = plan.shard_bytes if tiers["grads"] != "device" and group.trainable_elements else 0
    return comes + goes


def coded_bytes(plan: GroupPlan, passes: int = 1) -> int:
    """What codecs read and write: each shard and each code once, and what is decoded.

    Weights in each of so many forwards and backwards, gradients once.
    """
    world = plan.layout.world_size
    codes, total = plan.payloads, 0
    if codes.gather is not None:
        # A block keeps slices of what was decoded.
        gathers = passes * (1 + (plan.reshard_after_forward is True))
        total += gathers * (plan.shard_bytes + (world + 1) * codes.gather + plan.unsharded_bytes)
    if codes.reduce is not None:
        total += plan.unsharded_bytes + 2 * world * codes.reduce + plan.shard_bytes
    if codes.replicas is not None:
        total += 2 * plan.shard_bytes + 2 * codes.replicas
    return total
