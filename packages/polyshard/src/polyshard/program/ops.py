"""Programs: what one parameter group does in one phase, as operations over memory.

[Note: programs]
A program has two parts. ``issue`` starts work and returns to its caller; ``complete`` joins that
work and hands the result over. Forward code, prefetch and handles run between the two. A program is
compiled once from what the plan settled, so an operation asks for no setting and no feature: what a
group does not use is not in its program. What differs between runs is in the *frame* of a run; an
operation holds no state of a run, because two runs of one group may be in flight.

[Note: waits]
Operations run on *lanes*: the compute lane is the stream that is current when a part runs, the
others are streams of their own. An operation waits for the last writer of what it reads, and for
the last writer and all readers of what it writes, where those ran on another lane. What an earlier
wait implies is left out. Memory that outlives a run counts as written by the compute lane before
the run begins. Waits are derived here, when a program is compiled: a step records events and waits
for them, and where a device has no streams it does neither.

Two things come from outside and are not derived: which stream is current, and the order in which
programs are issued, which is the order of collectives on a communicator. The host follows no
stream: it waits in transports without streams and where a storage settles, nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import override

if TYPE_CHECKING:
    from torch import Tensor

    from polyshard.transport.base import Pending

ENTRY = -1
"""The place before the first operation, on the compute lane."""


class Lane(Enum):
    """Where an operation runs. See [Note: waits]."""

    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"
    REPLICA = "replica"


class Memory(Enum):
    """What operations of a group read and write."""

    SHARD = "shard"
    UNSHARDED = "unsharded"
    STAGING = "staging"
    """Rows of parameters that travel packed, before they are copied home."""
    SLICE = "block slice"
    """What a rank of a block keeps between forward and backward."""
    PAYLOAD = "payload"
    PAYLOADS = "payloads"
    GRADIENTS = "gradients"
    """What autograd wrote: read, never written."""
    PACKED = "packed gradients"
    TOTAL = "total"
    """The sum over the shard axis, then over replicas."""
    PARTIAL = "partial sum"
    """A sum that waits for replicas."""
    HELD = "held gradients"
    """Reduced, and kept on the device until the last backward of an iteration."""
    GRAD = "sharded gradients"


class Traffic(NamedTuple):
    """Bytes of one run on this rank: what the plan shows, and messages between engines apart."""

    sent: int = 0
    received: int = 0
    replicas: int = 0
    """What stands for a sum over replicas, once."""
    control: int = 0

    @override
    def __add__(self, other: object) -> Traffic:
        """Both together."""
        assert isinstance(other, Traffic)
        return Traffic(*map(sum, zip(self, other, strict=True)))


NO_TRAFFIC = Traffic()


@dataclass(frozen=True)
class OpPlan:
    """One operation of a program, in text and numbers of this rank."""

    name: str
    lane: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    plugin: str
    traffic: Traffic
    takes: int
    """Bytes of device memory that it takes."""
    frees: int
    """Bytes of what the program took that are free after it, or of a block's slice."""
    is_own: bool = False
    """Whether it is this rank's alone, which others need not have."""

    @override
    def __str__(self) -> str:
        """One line for people, and for ranks to compare."""
        lane = "" if self.lane == Lane.COMPUTE.value else f" on {self.lane}"
        by = "" if self.plugin == "polyshard" else f" by {self.plugin}"
        uses = f"{_listed(' reads', self.reads)}{_listed(' writes', self.writes)}"
        return f"{self.name}{by}{lane}{uses}"


def _listed(what: str, memory: Sequence[str]) -> str:
    return f"{what} {', '.join(memory)};" if memory else ""


@dataclass(frozen=True)
class ProgramPlan:
    """What one group runs in one phase, with the gradients of all trainable parameters.

    Of memory it says what the program takes for itself. Gradients are autograd's, and their sums
    lie in memory that is kept from step to step.
    """

    name: str
    ops: tuple[OpPlan, ...]
    cut: int
    """How many operations start the work; the others join it."""

    @property
    def traffic(self) -> Traffic:
        """Bytes of one run."""
        return sum((op.traffic for op in self.ops), NO_TRAFFIC)

    @property
    def kept_bytes(self) -> int:
        """What a run leaves taken: unsharded parameters, less the slice they came from."""
        return sum(op.takes - op.frees for op in self.ops)

    @property
    def scratch_bytes(self) -> int:
        """The most that a run takes beside what it leaves taken."""
        taken = most = 0
        for op in self.ops:
            taken += op.takes
            most = max(most, taken)
            taken -= op.frees
        return most - max(taken, 0)

    @override
    def __str__(self) -> str:
        """A line for each operation; a rule between the parts."""
        return "\n".join(self.lines(own=True))

    def lines(self, *, own: bool) -> list[str]:
        """The same line by line, with this rank's ``own`` operations or without."""
        parts = (self.ops[: self.cut], self.ops[self.cut :])
        issue, complete = ([f"  {op}" for op in part if own or not op.is_own] for part in parts)
        return [f"{self.name}:", *issue, "  --", *complete]


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a program."""

    name: str
    run: Callable[[Frame], object]
    """``True`` ends the run early."""
    lane: Lane = Lane.COMPUTE
    reads: tuple[Memory, ...] = ()
    writes: tuple[Memory, ...] = ()
    undo: Callable[[Frame], object] | None = None
    """Called when a run is abandoned after this operation started."""
    traffic: Callable[[frozenset[int]], Traffic] | None = None
    """Bytes of a run, for the parameters whose gradients are present."""
    memory: Callable[[frozenset[int]], tuple[int, int]] | None = None
    """Bytes that it takes and frees on the device, likewise."""
    plugin: str = "polyshard"
    """Whose code it calls."""
    is_own: bool = False
    """Whether it is this rank's alone: plans are the same without it."""
    waits: tuple[int, ...] = ()
    """Places of operations on other lanes that end before this one; filled in by compiling."""
    marks: bool = False
    """Whether an operation of another lane waits for the end of this one."""

    def planned(self, present: frozenset[int]) -> OpPlan:
        """Its entry in the plan, for the parameters whose gradients are present."""
        reads, writes = (tuple(m.value for m in ms) for ms in (self.reads, self.writes))
        traffic = NO_TRAFFIC if self.traffic is None else self.traffic(present)
        memory = (0, 0) if self.memory is None else self.memory(present)
        name, lane = self.name, self.lane.value
        return OpPlan(name, lane, reads, writes, self.plugin, traffic, *memory, self.is_own)


@dataclass(frozen=True, slots=True)
class Program:
    """What one group does in one phase. See [Note: programs]."""

    name: str
    ops: tuple[Op, ...]
    """``issue`` and ``complete``, one after the other."""
    cut: int
    """How many operations :attr:`issue` has."""
    early: int = 0
    """How many operations of :attr:`complete` may run ahead of the rest, to free what was sent."""
    lanes: tuple[Lane, ...] = ()
    """Those beside the compute lane, each once."""
    marks_entry: bool = False
    """Whether an operation waits for what the compute lane was given before the run."""
    moved: Traffic = NO_TRAFFIC
    """Bytes of a run with the parameters that the program was made for."""

    @property
    def issue(self) -> tuple[Op, ...]:
        """What starts the work."""
        return self.ops[: self.cut]

    @property
    def complete(self) -> tuple[Op, ...]:
        """What joins it."""
        return self.ops[self.cut :]

    def traffic(self, present: frozenset[int]) -> Traffic:
        """Bytes of one run, for the parameters whose gradients are present."""
        return _traffic(self.ops, present)

    def planned(self, present: frozenset[int] = frozenset()) -> ProgramPlan:
        """Its entry in the plan, for the parameters whose gradients are present."""
        return ProgramPlan(self.name, tuple(op.planned(present) for op in self.ops), self.cut)


class Frame:
    """One run of a program in flight: how far it is, and what differs between runs.

    Values here are those of a run that has not begun.
    """

    program: Program
    at = 0
    """How many operations have started."""
    is_over = False
    home: Any = None
    """The stream of its compute lane, on a device that has some."""
    pending: Pending | None = None
    """The transfer to be waited for."""
    is_torn = False
    """Whether that failed: peers that still run may write to, or read, its memory later. So it is
    not given back, and the next run uses it."""
    gradients: dict[int, Tensor]
    present: list[int]
    """Parameters with a gradient in what is reduced, by index."""
    key: Any
    table: Any = None
    said: Any = None
    pieces: Any = None
    packed: Any = None
    total: Any = None
    """The sum (``[shard_numel]``), once there is memory for it."""
    kept: tuple[Tensor, ...] = ()
    """Memory of the compute lane that other lanes use, until they are joined."""
    landing: Any = None
    has_placed = False
    """Whether sharded gradients were put in place."""

    def join(self) -> None:
        """Order the home stream behind every lane of the run."""


def _traffic(ops: Iterable[Op], present: frozenset[int]) -> Traffic:
    total = NO_TRAFFIC
    for op in ops:
        if op.traffic is not None:
            total += op.traffic(present)
    return total


def compiled(
    name: str,
    issue: Iterable[Op],
    complete: Iterable[Op] = (),
    present: frozenset[int] = frozenset(),
    *,
    early: int = 0,
) -> Program:
    """A program whose operations wait for each other. See [Note: waits]."""
    first = tuple(issue)
    ops = with_waits((*first, *complete))
    lanes = dict.fromkeys(op.lane for op in ops if op.lane is not Lane.COMPUTE)
    marks_entry = any(ENTRY in op.waits for op in ops)
    moved = _traffic(ops, present)
    return Program(name, ops, len(first), early, tuple(lanes), marks_entry, moved)


def with_waits(ops: Sequence[Op]) -> tuple[Op, ...]:
    """``ops`` with the waits that their memory asks for."""
    found, marked = [], set()
    written: dict[Memory, int] = {}
    read: dict[Memory, list[int]] = {}
    known: dict[Lane, dict[Lane, int]] = {Lane.COMPUTE: {Lane.COMPUTE: ENTRY}}
    """By lane: the last place of every lane that its next operation comes after."""
    after: dict[int, dict[Lane, int]] = {ENTRY: {Lane.COMPUTE: ENTRY}}
    for place, op in enumerate(ops):
        needed = {written.get(memory, ENTRY) for memory in (*op.reads, *op.writes)}
        for memory in op.writes:
            needed.update(read.get(memory, ()))
        clock, waits = dict(known.get(op.lane, {})), []
        for earlier in sorted(needed, reverse=True):  # later ones imply earlier ones
            lane = Lane.COMPUTE if earlier == ENTRY else ops[earlier].lane
            if lane is op.lane or clock.get(lane, ENTRY - 1) >= earlier:
                continue
            waits.append(earlier)
            for other, seen in after[earlier].items():
                clock[other] = max(clock.get(other, ENTRY - 1), seen)
        clock[op.lane] = place
        known[op.lane] = after[place] = clock
        for memory in op.writes:
            written[memory], read[memory] = place, []
        for memory in op.reads:
            read.setdefault(memory, []).append(place)
        marked.update(waits)
        found.append(replace(op, waits=tuple(waits)))
    _check_joined(ops, known[Lane.COMPUTE])
    return tuple(replace(op, marks=place in marked) for place, op in enumerate(found))


def _check_joined(ops: Sequence[Op], known: dict[Lane, int]) -> None:
    """Every lane's last operation ends before the run does: memory goes back afterwards."""
    last = {op.lane: place for place, op in enumerate(ops)}
    for lane, place in last.items():
        assert known.get(lane, ENTRY - 1) >= place, f"{ops[place].name} is never joined"
