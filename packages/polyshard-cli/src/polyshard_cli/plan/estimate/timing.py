"""Time of a step on a machine: lanes of compute, gathers and reductions, as the engine uses them.

[Note: time of a step]
A unit computes for as long as its kernels take: matrix products what the machine reaches at their
operations for each byte, others the time of their bytes. An accelerator takes no shorter than
launching them does; a CPU launches and computes in turn. Collectives of its own hold a unit up. The
next unit is gathered meanwhile, and the last one's gradients are reduced. What does not fit beside
compute is *exposed*, and so is what transfers take from it where the same cores do both. Transfers
of one lane follow one another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from polyshard_cli.plan.dry_run.planning import PlannedGroup
from polyshard_cli.plan.dry_run.probing import Cost, Probe
from polyshard_cli.plan.dry_run.recorder import Account, Kernel
from polyshard_cli.plan.estimate.machines import Link, Machine
from polyshard_cli.plan.estimate.memory import STATES
from polyshard_cli.plan.estimate.timeline import Lane, Span, Timeline
from polyshard_cli.plan.estimate.traffic import Transfer
from polyshard_cli.plan.estimate.transfers import (
    accumulated_bytes,
    copied_by_gathers,
    copied_by_reductions,
)
from polyshard_cli.plan.request.mesh import MeshSpec
from polyshard_cli.plan.request.settings import OptimizerName

SLOWED = "transfers that take from compute"


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
class Work:
    """What a step does."""

    groups: Sequence[PlannedGroup]
    found: Probe
    """What units cost in one micro-batch."""
    traffic: Sequence[Transfer]
    """Of the whole step."""
    micro_batches: int = 1


def time_of(work: Work, machine: Machine, mesh: MeshSpec, optimizer: OptimizerName) -> Timing:
    """The time of a step."""
    step = _Step(work, machine, mesh)
    return step.timing(_optimizer_seconds(work.groups, machine, optimizer))


def _optimizer_seconds(
    groups: Sequence[PlannedGroup], machine: Machine, optimizer: OptimizerName
) -> float:
    """Reads gradients, reads and writes parameters and state."""
    elements = sum(g.trainable_elements * g.plan.dtypes.orig.itemsize for g in groups)
    rate = machine.optimizer_bytes_per_second or machine.memory_bytes_per_second
    return elements * (3 + 2 * STATES[optimizer]) / rate


class _Step:
    """Lanes, and what is waited for."""

    def __init__(self, work: Work, machine: Machine, mesh: MeshSpec) -> None:
        groups, found = work.groups, work.found
        self._found, self._machine, self._mesh = found, machine, mesh
        self._passes = work.micro_batches
        self._sums: Counter[str] = Counter()
        for group in groups:
            self._sums[group.unit] += accumulated_bytes(group.plan)
        self._dtype = {g.unit: str(g.plan.dtypes.param).removeprefix("torch.") for g in groups}
        units = list(dict.fromkeys(g.unit for g in groups))
        self._names = [n for n in found.units if n in units] or [n for n in units if n]
        self._gathers: dict[tuple[str, str], float] = {}
        self._reductions: dict[str, float] = {}
        unit_of = {group.plan.name: group.unit for group in groups}
        own: dict[tuple[str, str], float] = {}
        for transfer in work.traffic:
            seconds = self._seconds(transfer)
            if not transfer.is_counted and transfer.axis == mesh.name("tensor"):
                name = "" if transfer.unit == "(root)" else transfer.unit
                each = seconds / self._passes
                own[name, transfer.phase] = own.get((name, transfer.phase), 0.0) + each
                continue
            name = unit_of.get(transfer.unit, "")
            if transfer.collective == "all-gather" and transfer.is_counted:
                key = (name, transfer.phase)
                self._gathers[key] = self._gathers.get(key, 0.0) + seconds / self._passes
            else:
                self._reductions[name] = self._reductions.get(name, 0.0) + seconds
        self._own: Mapping[tuple[str, str], float] = own
        for group in groups:
            self._add_copies(group)

    def _add_copies(self, group: PlannedGroup) -> None:
        """To cast and pack what is sent, and to unpack what came, takes from the same lanes."""
        rate, world = self._machine.memory_bytes_per_second, group.plan.layout.world_size
        for phase in ("forward", "backward"):
            if world > 1 and (group.unit, phase) in self._gathers:
                self._gathers[group.unit, phase] += copied_by_gathers(group.plan) / rate
        if world > 1 and group.unit in self._reductions:
            self._reductions[group.unit] += copied_by_reductions(group.plan) / rate

    def timing(self, optimizer_seconds: float) -> Timing:
        exposed: dict[str, float] = {}
        self._clock = self._gather_end = self._reduce_end = 0.0
        self._timeline = Timeline()
        for index in range(self._passes):
            self._micro_batch(index, exposed)
        self._wait(self._reduce_end, "last reductions", exposed)
        tensor = self._passes * sum(self._own.values())
        if tensor:
            exposed["collectives of tensor parallelism"] = tensor
        accounts = self._accounts()
        end = self._clock + optimizer_seconds
        self._timeline.add("compute", "", "optimizer", self._clock, end)
        return Timing(
            step_seconds=end,
            compute_seconds=self._passes * sum(self._compute(*account) for account in accounts),
            optimizer_seconds=optimizer_seconds,
            gather_seconds=self._passes * sum(self._gathers.values()),
            reduce_seconds=sum(self._reductions.values()),
            exposed=tuple(exposed.items()),
            spans=self._timeline.spans,
        )

    def _micro_batch(self, index: int, exposed: dict[str, float]) -> None:
        """One forward and backward; the last one's gradients are reduced."""
        self._wait(self._gather("", "forward"), "first gather of the root", exposed)
        self._pass("forward", self._names, exposed)
        self._run("", self._found.root.forward, "forward", exposed)
        self._run("", self._found.root.backward, "backward", exposed)
        self._pass("backward", self._names[::-1], exposed, index)
        self._leave("", index)

    def _pass(
        self, phase: str, names: Sequence[str], exposed: dict[str, float], index: int = 0
    ) -> None:
        """Units one after the other; the next is gathered while one computes."""
        arrival = self._gather(names[0], phase) if names else 0.0
        for place, name in enumerate(names):
            self._wait(arrival, f"gathers in {phase}", exposed)
            if place + 1 < len(names):
                arrival = self._gather(names[place + 1], phase)
            cost = self._found.units.get(name, Cost())
            account = cost.forward if phase == "forward" else cost.backward
            stolen = self._run(name, account, phase, exposed)
            arrival += stolen
            if phase == "backward":
                self._leave(name, index)

    def _leave(self, name: str, index: int) -> None:
        """Add the gradients of a unit to those of earlier micro-batches; reduce the sum."""
        if index:  # reads two, and writes one
            start = self._clock
            self._clock += 3 * self._sums[name] / self._machine.memory_bytes_per_second
            self._timeline.add("compute", name, "backward", start, self._clock)
        if index + 1 == self._passes:
            self._reduce(name)

    def _gather(self, name: str, phase: str) -> float:
        """When a gather that is started now ends."""
        start = max(self._gather_end, self._clock)
        self._gather_end = start + self._gathers.get((name, phase), 0.0)
        self._timeline.add("gathers", name, phase, start, self._gather_end)
        return self._gather_end

    def _reduce(self, name: str) -> None:
        """Start to reduce the gradients of a unit."""
        start = max(self._reduce_end, self._clock)
        self._reduce_end = start + self._reductions.get(name, 0.0)
        self._timeline.add("reductions", name, "backward", start, self._reduce_end)

    def _run(self, name: str, account: Account, phase: str, exposed: dict[str, float]) -> float:
        """Compute a unit; return by how much that holds up transfers beside it.

        What a transfer beside it takes from compute, compute takes from the transfer.
        """
        seconds, start = self._compute(name, account, phase), self._clock
        share = 1.0 - self._machine.overlap
        lanes = (self._gather_end, self._reduce_end)
        beside = [min(max(end - self._clock, 0.0), seconds) for end in lanes]
        stolen = share * sum(beside)
        self._clock += seconds + stolen
        self._timeline.add("compute", name, phase, start, self._clock)
        if stolen:
            exposed[SLOWED] = exposed.get(SLOWED, 0.0) + stolen
            self._gather_end = self._held_up("gathers", self._gather_end, share * beside[0])
            self._reduce_end = self._held_up("reductions", self._reduce_end, share * beside[1])
        return share * beside[0]

    def _held_up(self, lane: Lane, end: float, seconds: float) -> float:
        """When the transfers of a lane end that are held up for so long."""
        if seconds:
            self._timeline.stretch(lane, end + seconds)
        return end + seconds

    def _wait(self, until: float, what: str, exposed: dict[str, float]) -> None:
        if until > self._clock:
            exposed[what] = exposed.get(what, 0.0) + until - self._clock
            self._clock = until

    def _accounts(self) -> list[tuple[str, Account, str]]:
        costs = [("", self._found.root), *self._found.units.items()]
        return [
            (name, account, phase)
            for name, cost in costs
            for account, phase in ((cost.forward, "forward"), (cost.backward, "backward"))
        ]

    def _compute(self, name: str, account: Account, phase: str) -> float:
        machine, dtype = self._machine, self._dtype.get(name, "float32")
        kernels = account.kernels
        busy = sum(count * seconds_of(k, dtype, machine) for k, count in kernels.items())
        launched = kernels.total() * machine.operation_seconds
        launched += account.divided * machine.divided_seconds
        computing = max(busy, launched) if machine.is_ahead else busy + launched
        return computing + self._own.get((name, phase), 0.0)

    def _ranks(self, axis: str) -> int:
        return next((one.size for one in self._mesh.axes if one.name == axis), 2)

    def _seconds(self, transfer: Transfer) -> float:
        link = link_of(transfer.axis, self._mesh, self._machine)
        machine = self._machine
        own = machine.transfer_seconds
        if not transfer.is_counted:  # a ring of fewer ranks has fewer turns
            own = machine.collective_seconds * (self._ranks(transfer.axis) - 1)
        seconds = transfer.calls * (own or link.latency_seconds)
        seconds += transfer.sent_bytes / link.bytes_per_second
        if transfer.collective in ("reduce-scatter", "all-reduce"):  # reads two, and writes one
            seconds += 3 * transfer.sent_bytes / self._machine.memory_bytes_per_second
        return seconds


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


def link_of(axis: str, mesh: MeshSpec, machine: Machine) -> Link:
    """What ranks of ``axis`` talk over: within a host if all of its ranks are on one.

    NCCL's rings leave a host by the network card of each rank that the axis has there. gloo's
    ranks send to each other directly.
    """
    inner = 1
    for found in reversed(mesh.axes):
        if found.name != axis:
            inner *= found.size
            continue
        if inner * found.size <= machine.ranks_per_host:
            return machine.inside
        cards = max(1, machine.ranks_per_host // inner) if machine.backend == "nccl" else 1
        rate = min(machine.inside.bytes_per_second, cards * machine.between.bytes_per_second)
        return replace(machine.between, bytes_per_second=rate)
    return machine.inside
