"""What a trace holds: spans of a kind, on a lane, and the lines they become in a file.

A line is one event of the `trace event format
<https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>`_, which Perfetto
and ``chrome://tracing`` read: a complete event (``"ph": "X"``) a span, times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "CLOCK",
    "MOVES",
    "SCHEMA",
    "Kind",
    "Span",
    "instant_line",
    "micros",
    "process_lines",
    "track_lines",
]

SCHEMA = 1
CLOCK = "clock offset"
"""The event that says how a rank's clock stands to the reference's."""
_LANES = 1000  # thread numbers a kind has for itself


class Kind(StrEnum):
    """What a span is; ``cat`` of its event."""

    STEP = "step"
    WAIT = "wait"
    OPTIMIZER = "optimizer"
    FORWARD = "forward"
    BACKWARD = "backward"
    GATHER = "gather"
    REDUCE = "reduce"
    REPLICAS = "replicas"
    STAGING = "staging"


MOVES = (Kind.GATHER, Kind.REDUCE, Kind.REPLICAS, Kind.STAGING)

_TRACKS = {
    Kind.STEP: "steps",
    Kind.WAIT: "host: waits",
    Kind.OPTIMIZER: "compute: optimizer",
    Kind.FORWARD: "compute: forward",
    Kind.BACKWARD: "compute: backward",
    Kind.GATHER: "transfers: gathers",
    Kind.REDUCE: "transfers: reductions",
    Kind.REPLICAS: "transfers: sums over replicas",
    Kind.STAGING: "transfers: staging",
}


_FIRST_LANES = {kind: (1 + place) * _LANES for place, kind in enumerate(Kind)}
_compact = json.JSONEncoder(separators=(",", ":")).encode  # made once: dumps() makes one each time


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took from ``begin_ns`` to ``end_ns`` of this rank's clock.

    Spans of one kind overlap only on different lanes, those of forward excepted, which nest.
    """

    kind: Kind
    name: str
    begin_ns: int
    end_ns: int
    lane: int = 0
    args: Mapping[str, object] = field(default_factory=dict)

    @property
    def track(self) -> int:
        """The thread that viewers show it on."""
        return _track_of(self.kind, self.lane)

    def line(self, rank: int) -> str:
        """The event, as one line of JSON."""
        return (
            f'{{"name":{json.dumps(self.name)},"cat":"{self.kind.value}","ph":"X",'
            f'"ts":{micros(self.begin_ns)},"dur":{micros(self.end_ns - self.begin_ns)},'
            f'"pid":{rank},"tid":{self.track},"args":{_compact(self.args)}}}'
        )


def _track_of(kind: Kind, lane: int) -> int:
    """Numbers in the order in which tracks are shown."""
    return _FIRST_LANES[kind] + lane


def track_lines(kind: Kind, lane: int, rank: int) -> list[str]:
    """What names a track, and puts it in its place."""
    title = _TRACKS[kind] + (f" {lane + 1}" if lane else "")
    track = _track_of(kind, lane)
    return [
        _named_line("thread_name", rank, {"name": title}, track),
        _named_line("thread_sort_index", rank, {"sort_index": track}, track),
    ]


def process_lines(rank: int, host: str) -> list[str]:
    """What names a rank, and puts it in its place."""
    return [
        _named_line("process_name", rank, {"name": f"rank {rank} ({host})"}),
        _named_line("process_sort_index", rank, {"sort_index": rank}),
    ]


def _named_line(name: str, rank: int, args: Mapping[str, object], track: int = 0) -> str:
    """A line that is about a process or a thread, not about a time."""
    return _compact({"name": name, "ph": "M", "pid": rank, "tid": track, "args": args})


def instant_line(name: str, rank: int, at_ns: int, args: Mapping[str, object]) -> str:
    """A line about one moment of a rank."""
    return (
        f'{{"name":{json.dumps(name)},"cat":"clock","ph":"i","s":"p","ts":{micros(at_ns)},'
        f'"pid":{rank},"tid":0,"args":{_compact(args)}}}'
    )


def micros(nanoseconds: int) -> str:
    """Microseconds to the last nanosecond; a float would round what a long uptime makes large."""
    sign, size = "-" if nanoseconds < 0 else "", abs(nanoseconds)
    return f"{sign}{size // 1000}.{size % 1000:03d}"
