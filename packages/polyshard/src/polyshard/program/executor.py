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

from typing_extensions import override

from polyshard._torch.private import NO_SPAN, profiler_runs, profiler_span
from polyshard.errors import PolyshardError
from polyshard.memory.streams import Event, Lanes, Streams, streams_of
from polyshard.program.ops import ENTRY, Frame, Lane, Program

if TYPE_CHECKING:
    import torch

    from polyshard.failures import Part


class LaneFrame(Frame):
    """A run on a device with streams. See [Note: lifetime]."""

    def __init__(self, lanes: Lanes, streams: Streams) -> None:
        """``lanes`` are those of the root."""
        self.lanes = lanes
        self.streams = streams
        self.events: dict[int, Event] = {}

    def __del__(self) -> None:
        """A run that was dropped before its end."""
        if not (self.home is None or self.is_over or sys.is_finalizing()):
            self.join()

    @override
    def join(self) -> None:
        if self.home is not None:
            for lane in self.program.lanes:
                self.home.wait_stream(self.lanes.stream_of(lane.value, self.streams))


def new_frame(program: Program, lanes: Lanes, device: torch.device) -> Frame:
    """A run of ``program`` that has not begun, with memory on ``device``."""
    streams = streams_of(device)
    frame = Frame() if streams is None else LaneFrame(lanes, streams)
    frame.program = program
    return frame


def run(frame: Frame, stop: int, part: Part, label: str) -> None:
    """Run the operations before place ``stop`` that have not run yet.

    Args:
        frame: of the run.
        stop: a place in the program's operations.
        part: whose handler explains an exception by that of another rank, or tells the others.
        label: what a profiler shows, beside the name of the group.

    Raises:
        PeerError: when another rank failed first, here or before.
    """
    handler = part.handler
    if part.is_watched:
        handler.begin(part)
    try:
        with profiler_span(label, str(part)) if profiler_runs() else NO_SPAN:
            if isinstance(frame, LaneFrame):
                _run_from_home(frame, stop)
            else:
                operations = frame.program.ops
                for place in range(frame.at, stop):
                    frame.at = place + 1
                    if operations[place].run(frame):
                        frame.is_over = True
                        return
    except Exception as error:
        if frame.at and not isinstance(error, PolyshardError):  # those say who and where
            op = frame.program.ops[frame.at - 1]
            error.add_note(f"in operation '{op.name}' of {op.plugin}, {label} of group '{part}'")
        handler.explain(part, error)
        raise
    if stop == len(frame.program.ops):
        frame.is_over = True


def _run_from_home(frame: LaneFrame, stop: int) -> None:
    """As :func:`run`, on lanes.

    The compute lane of a run is its home, so that memory comes from and goes to one stream: a part
    that is run while another stream is current begins behind that one, which continues behind it.
    """
    streams = frame.streams
    current = streams.current()
    if frame.home is None:
        frame.home = current
        if frame.program.marks_entry:
            frame.events[ENTRY] = streams.mark()
    if current == frame.home:
        _run_on_lanes(frame, stop)
        return
    frame.home.wait_stream(current)
    with streams.on(frame.home):
        _run_on_lanes(frame, stop)
    current.wait_stream(frame.home)


def _run_on_lanes(frame: LaneFrame, stop: int) -> None:
    """Run operations while the home stream is current."""
    for place in range(frame.at, stop):
        frame.at = place + 1
        if _run_on_lane(frame, place):
            frame.join()
            frame.is_over = True
            return


def _run_on_lane(frame: LaneFrame, place: int) -> object:
    """One operation, behind those of other lanes that it waits for."""
    streams, op = frame.streams, frame.program.ops[place]
    on_compute = op.lane is Lane.COMPUTE
    stream = frame.home if on_compute else frame.lanes.stream_of(op.lane.value, streams)
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


def return_home(home: Any, device: torch.device) -> None:
    """Order ``home``, where memory was taken, behind the current stream, which used it last."""
    streams = streams_of(device)
    current = None if streams is None else streams.current()
    if current != home:
        home.wait_stream(current)


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
