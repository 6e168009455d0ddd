"""Which faults are tested, under which plugins, and what each rank sees.

One table, read by ``integration_tests/test_faults.py`` (which runs every cell on real ranks), by
``python -m faults`` beside it (which measures them) and by ``tools/make_fault_docs.py`` (which
prints it). Nothing of torch is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from composition_table import FSDP, FSDP_TP, HSDP, STACKS, Cell, Layout, Stack
from subsets import stack_of

TIMEOUT_SECONDS = 120.0
"""Of the process group, in every cell."""
BAR_SECONDS = 12.0
"""A cell that takes longer fails: far above what a busy machine needs, far below the time-out."""
STRUCK = 1
"""The rank that fails."""


class Way(Enum):
    """How ranks continue afterwards."""

    IN_PROCESS = "`reset_iter_state()`"
    NEXT_BATCH = "continue, for example with another batch"
    NEW_PLAN = "fix it and call `fully_shard` again"
    RESTART = "restart from the last checkpoint"


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong on one rank.

    Attributes:
        id: names the cell's test, and the function that brings it about.
        what: as the page says it.
        struck: class of the exception that the rank meets; empty if its process ends.
        peers: class of the exception that all others raise.
        words: what theirs says, in this order.
        keeper: whether it is the rank that keeps the store (rank 0) that is struck.
    """

    id: str
    what: str
    struck: str
    peers: str
    words: tuple[str, ...]
    way: Way = Way.IN_PROCESS
    keeper: bool = False

    @property
    def is_attempted(self) -> bool:
        """Whether all steps are made in ``polyshard_resilience.attempt``."""
        return self.id.startswith("attempt-")

    @property
    def rank(self) -> int:
        """The rank that is struck."""
        return 0 if self.keeper else STRUCK


AGAIN = "reset_iter_state() on every rank"
CHECKPOINT = "restart the job from its last checkpoint"


def _raised(name: str, what: str, kind: str, *words: str) -> Fault:
    return Fault(name, what, kind, "PeerError", ("rank 1 failed", *words, AGAIN))


def _apart(name: str, what: str, *words: str) -> Fault:
    kind = "ControlFlowError"
    return Fault(name, what, kind, kind, ("control flow differs between ranks", *words, AGAIN))


def _planned(name: str, what: str) -> Fault:
    words = ("rank 1", "ArithmeticError: on purpose", "faulty")
    return Fault(name, what, "ArithmeticError", "PlanMismatchError", words, Way.NEW_PLAN)


def _ended(name: str, what: str, *words: str, keeper: bool = False) -> Fault:
    return Fault(name, what, "", "PeerError", words, Way.RESTART, keeper)


SAVE = "Save the remaining state"


def _attempted(
    name: str, what: str, *words: str, ended: bool = True, keeper: bool = False
) -> Fault:
    struck, way = ("", Way.RESTART) if ended else ("AttemptError", Way.NEXT_BATCH)
    return Fault(f"attempt-{name}", what, struck, "AttemptError", words, way, keeper)


FAULTS = (
    _raised("forward", "the model's forward raises",
            "ArithmeticError", "in the forward of 'blocks.1", "ArithmeticError: on purpose"),
    _raised("backward", "the model's backward raises",
            "ArithmeticError", "in its backward, when it had reached 'blocks.1",
            "ArithmeticError: on purpose"),
    _raised("memory", "out of memory in forward",
            "OutOfMemoryError", "in the forward of 'blocks.1", "OutOfMemoryError: on purpose"),
    _raised("transfer", "the engine raises in a transfer",
            "OSError", "OSError: on purpose"),
    _raised("encode", "a codec raises in `encode`",
            "ArithmeticError", "on purpose"),
    _raised("decode", "in `decode`",
            "ArithmeticError", "on purpose"),
    _raised("storage", "a storage raises in `fetch`",
            "ArithmeticError", "on purpose"),
    _raised("observer", "an observer raises",
            "ArithmeticError", "on purpose"),
    _planned("contribution", "a plugin's hook raises in `fully_shard`"),
    _planned("bind", "a codec's `bind` does"),
    _planned("create", "a storage's `create` does"),
    _apart("evaluation", "one rank evaluates once more",
           "rank 0 is at", "rank 1 is at"),
    _apart("skipped", "it skips a backward",
           "rank 0 is at", "rank 1 is at"),
    _apart("order", "it runs layers in another order",
           "rank 0 is at", "rank 1 is at"),
    _apart("unused", "it leaves a layer out",
           "rank 0 is at", "rank 1 is at"),
    _ended("optimizer", "the optimizer raises, uncaught",
           "rank 1 failed with an uncaught exception", "ArithmeticError: on purpose"),
    _ended("loop", "the training loop does",
           "rank 1 failed with an uncaught exception", "ArithmeticError: on purpose"),
    _ended("exit", "the process exits a step early",
           "rank 1 has ended", CHECKPOINT),
    _ended("killed", "the process is killed (SIGKILL)",
           "rank 1 is gone", "killed", CHECKPOINT),
    _ended("stopped", "the process is stopped (SIGSTOP)",
           "rank 1 was stopped", "kill -CONT"),
    _ended("keeper-killed", "the rank that keeps the store is killed",
           "rank 0 is gone", CHECKPOINT, keeper=True),
    _ended("keeper-stopped", "the rank that keeps the store is stopped",
           "rank 0 was stopped", "kill -CONT", keeper=True),
    _attempted("killed",
               "in `attempt`, the process is killed; others are in other collectives",
               "rank 1 is gone", "killed", SAVE),
    _attempted("stopped",
               "the same, stopped",
               "rank 1: rank 1 was stopped", "kill -CONT"),
    _attempted("skipped", "in `attempt`, one rank skips a backward",
               "control flow differs between ranks", "rank 0 is at",
               "rank 1 is at the vote of an attempt", ended=False),
    _attempted("loop", "the loop raises between attempts, uncaught",
               "rank 1 failed with an uncaught exception", "ArithmeticError: on purpose",
               SAVE),
    _attempted("exit", "in `attempt`, the process exits",
               "rank 1: SystemExit", "it leaves", SAVE),
    _attempted("keeper-killed", "in `attempt`, the rank that keeps the store is killed",
               "rank 0 is gone", SAVE, keeper=True),
)  # fmt: skip

SAMPLE = ("forward", "backward", "decode", "killed")
"""What CI runs, without plugins; the rest is run by who changes how ranks fail."""
DEVICE_SAMPLE = ("forward", "skipped", "killed")
"""The same on two ranks with a simulated device each."""


@dataclass(frozen=True)
class FaultCell:
    """One test."""

    fault: Fault
    stack: Stack
    layout: Layout
    device: str = "cpu"
    in_attempt: bool = False
    """Whether a fault that is no attempt's strikes in one nevertheless."""

    @property
    def id(self) -> str:
        """Names the cell in a test's id and in the file of figures."""
        device = () if self.device == "cpu" else (self.device,)
        attempt = ("attempted",) if self.in_attempt else ()
        names = (stack_of(self.stack), _mesh(self.layout), *device, *attempt, self.fault.id)
        return "-".join(names)

    @property
    def cell(self) -> Cell:
        """What is trained."""
        return Cell(self.stack, self.layout, "fp32", "plain")

    @property
    def is_brief(self) -> bool:
        """Whether CI runs it."""
        if self.device != "cpu":
            sampled = self.layout is FSDP and self.fault.id in DEVICE_SAMPLE
            return sampled and not self.in_attempt
        return not self.stack and self.fault.id in SAMPLE

    @property
    def words(self) -> tuple[str, ...]:
        """What the error of the others says, in this order.

        With tensor parallelism, either of the ranks that share a batch is named. On a device, a
        backward may end in another thread than the one that its exception gets to: whether that
        is quoted depends on which of them lets go of the backward last.
        """
        words = self.fault.words
        if self.in_attempt:
            apart = self.fault.peers == "ControlFlowError"
            return words[:-1] if apart else (f"rank {STRUCK}: ", "on purpose")
        if self.fault.peers == "ControlFlowError" and self.layout.tensor > 1:
            words = tuple("is at" if each.endswith("is at") else each for each in words)
        if self.device != "cpu" and self.fault.id == "backward":
            words = tuple(each for each in words if not each.endswith("on purpose"))
        return words

    @property
    def way(self) -> Way:
        """How its ranks continue."""
        return Way.NEXT_BATCH if self.in_attempt else self.fault.way

    @property
    def struck_kind(self) -> str:
        """Class of the exception of a struck rank; empty if its process ends."""
        return "AttemptError" if self.in_attempt else self.fault.struck

    @property
    def struck(self) -> tuple[int, ...]:
        """The ranks that are struck: control flow is that of all who share a batch."""
        share = self.layout.tensor
        if self.fault.peers != "ControlFlowError" or share == 1:
            return (self.fault.rank,)
        return tuple(range(share, 2 * share))

    @property
    def peers(self) -> tuple[str, ...]:
        """What other ranks may raise, whose words are the same in any case.

        One that waits in a collective of tensor parallelism in its backward raises what gloo did,
        with the words as a note.
        """
        kind = "AttemptError" if self.in_attempt else self.fault.peers
        is_beside = kind != "PlanMismatchError" and self.layout.tensor > 1
        return (kind, "RuntimeError") if is_beside else (kind,)


def _mesh(layout: Layout) -> str:
    return layout.name.replace(" × ", "x").lower()


def layout_of(stack: Stack) -> Layout:
    """Two ranks, or four with tensor parallelism."""
    return FSDP_TP if "tensor-parallel" in stack else FSDP


Column = tuple[Stack, Layout, str]
COLUMNS: tuple[Column, ...] = (
    ((), FSDP, "cpu"),
    ((), HSDP, "cpu"),
    *((stack, layout_of(stack), "cpu") for stack in STACKS if stack),
    ((), FSDP, "sim"),
    ((), HSDP, "sim"),
)
"""What the page shows the seconds of; the last are on the simulated device."""


def _is_measured(fault: Fault, column: Column) -> bool:
    """Attempts over gloo are measured with plain FSDP alone."""
    return not fault.is_attempted or column == COLUMNS[0] or column[2] != "cpu"


def _is_undone(fault: Fault) -> bool:
    """Whether an attempt would undo it, and none is one already."""
    return fault.way is Way.IN_PROCESS or fault.id == "optimizer"


FAULT_CELLS = (
    *(FaultCell(f, *column) for column in COLUMNS for f in FAULTS if _is_measured(f, column)),
    *(
        FaultCell(fault, *column, in_attempt=True)
        for column in COLUMNS
        for fault in FAULTS
        if column[2] != "cpu" and _is_undone(fault)
    ),
)

PEER_FAULTS = (
    *("forward", "backward", "memory", "evaluation", "skipped", "order", "unused"),
    *("optimizer", "loop", "exit", "killed", "stopped"),
)
"""Those that need no part of polyshard: they are tried on torch's own FSDP2 too."""
PEERS = ("torchrun", "torchft")
"""What it runs under: the launcher alone, or replica groups under torchft."""
PEER_GROUPS = 2
"""Replica groups, of two ranks each."""
PEER_TIMEOUT_SECONDS = 30.0
"""Of its process groups; torch's own is half an hour."""


class Verdict(NamedTuple):
    """What of a fault on FSDP2 does not depend on how busy the machine is.

    Attributes:
        saw_nothing: the other rank of the group; else gloo's error or torchrun's SIGTERM, which
            come at about the same moment.
        has_waited: that rank, for the time-out.
        goes_on: without a new start: the job, or the other group.
        is_restarted: the struck group.
    """

    saw_nothing: bool
    has_waited: bool
    goes_on: bool
    is_restarted: bool


def verdict(found: dict[str, Any]) -> Verdict:
    """Of what ``faults.peers.run_peer`` has found."""
    beside = found["beside"]
    has_waited = beside.get("seconds", 0.0) > 0.9 * PEER_TIMEOUT_SECONDS
    restarted = found.get("is_restarted", False)
    return Verdict(beside["saw"] == "nothing", has_waited, found["goes_on"], restarted)
