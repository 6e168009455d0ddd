"""Runs programs: the one place that knows waits between lanes, lifetime and failure of a run.

[Note: lifetime]
Memory is taken on the compute lane, on the stream that is current when a run is issued: its *home*.
It goes back there, so home must be ordered behind the last use before the run lets go of it. A run
that is completed has joined every lane. One that is dropped (a model goes in the middle of a
transfer, a step fails) orders its home behind its lanes first. The host is not held up by any of
this, and ``record_stream`` is never used: memory is deterministic.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from polyshard._torch.private import profiler_runs, profiler_span
from polyshard.memory.streams import Event, Lanes, streams_of
from polyshard.program.ops import ENTRY, Lane, Program

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from polyshard.alarm.failures import FailureReport
    from polyshard.transport.base import Pending


class Frame:
    """One run of a program in flight: how far it is, and what differs between runs."""

    __slots__ = (
        "at", "events", "gradients", "has_placed", "home", "is_over", "key", "landing", "lanes", "packed",
        "partial", "pending", "pieces", "present", "program", "said", "streams", "table", "total",
    )  # fmt: skip

    def __init__(self, program: Program, lanes: Lanes, device: torch.device) -> None:
        """Nothing has run yet.

        Args:
            program: what runs.
            lanes: those of the root.
            device: where its memory is.
        """
        self.program = program
        self.lanes = lanes
        self.streams = streams_of(device)
        self.at = 0
        """How many operations have started."""
        self.is_over = False
        self.home: Any = None
        self.events: dict[int, Event] = {}
        self.pending: Pending | None = None
        """The transfer to be waited for."""
        self.gradients: dict[int, Tensor]
        self.present: list[int]
        """Parameters with a gradient in what is reduced, by index."""
        self.key: Any
        self.table: Any = None
        self.said: Any = None
        self.pieces: Any = None
        self.packed: Any = None
        self.total: Tensor | None = None
        self.partial: Tensor | None = None
        self.landing: Any = None
        self.has_placed = False
        """Whether sharded gradients were put in place."""

    def __del__(self) -> None:
        """A run that nobody completed. See [Note: lifetime]."""
        if not (self.home is None or self.is_over or sys.is_finalizing()):
            self.join()

    def join(self) -> None:
        """Order the home stream behind every lane of the run."""
        if self.home is not None:
            for lane in self.program.lanes:
                self.home.wait_stream(self.lanes.stream_of(lane.value, self.streams))


def run(frame: Frame, stop: int, report: FailureReport, label: str) -> None:
    """Run the operations before place ``stop`` that have not run yet.

    Args:
        frame: of the run.
        stop: a place in the program's operations.
        report: explains an exception by that of another rank, or tells the others of it.
        label: what a profiler shows, beside the name of the group.

    Raises:
        PeerError: when another rank failed first, here or before.
    """
    report.begin()
    try:
        if profiler_runs():
            with profiler_span(label, str(report)):
                _run(frame, stop)
        elif frame.streams is None:
            operations = frame.program.ops
            for place in range(frame.at, stop):
                frame.at = place + 1
                if operations[place].run(frame):
                    frame.is_over = True
                    return
        else:
            _run(frame, stop)
    except Exception as error:
        report.explain(error)
        raise
    if stop == len(frame.program.ops):
        frame.is_over = True


def _run(frame: Frame, stop: int) -> None:
    """As :func:`run`, on lanes where the device has streams."""
    streams, program = frame.streams, frame.program
    current = None if streams is None else streams.current()
    if streams is None:
        pass
    elif frame.home is None:
        frame.home = current
        if program.marks_entry:
            frame.events[ENTRY] = streams.mark()
    elif current != frame.home:
        current.wait_stream(frame.home)
    for place in range(frame.at, stop):
        op = program.ops[place]
        frame.at = place + 1
        if streams is None:
            is_over = op.run(frame)
        else:
            is_over = _run_on_lane(frame, place, current)
        if is_over:
            frame.join()
            frame.is_over = True
            break
    if streams is not None and current != frame.home:
        frame.home.wait_stream(current)


def _run_on_lane(frame: Frame, place: int, current: Any) -> object:
    """One operation, behind those of other lanes that it waits for."""
    streams, op = frame.streams, frame.program.ops[place]
    assert streams is not None
    on_compute = op.lane is Lane.COMPUTE
    stream = current if on_compute else frame.lanes.stream_of(op.lane.value, streams)
    for earlier in op.waits:
        stream.wait_event(frame.events[earlier])
    if on_compute:
        is_over = op.run(frame)
    else:
        with streams.on(stream):
            is_over = op.run(frame)
    if op.marks:
        event = frame.events[place] = streams.new_event()
        event.record(stream)
    return is_over


def abandon(frame: Frame) -> None:
    """Undo what has started, latest first: transfers end, memory that was taken goes back."""
    if frame.is_over:
        return
    frame.join()  # before memory goes back
    for op in reversed(frame.program.ops[: frame.at]):
        if op.undo is not None:
            with suppress(RuntimeError):  # peers may be gone; they write to no memory either then
                op.undo(frame)
    frame.is_over = True
