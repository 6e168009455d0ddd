"""Where an engine's time goes, group by group, from the ranges both engines show to the profiler.

Parts of the time the training thread spends inside an engine's ranges:

- ``wait``: what is left of ranges that wait for a transfer (their Python, which is little beside
  it, included);
- ``copy``: operators that copy between shards, buffers and parameters;
- ``launch``: handing transfers to the backend;
- ``other``: sums, allocation and views;
- ``hook``: what is left of ranges that wait for nothing, the engine's own Python.

``transfer`` is apart from these: how long anything of the group was under way, hidden behind
compute or not; gloo takes a send or receive for over only when somebody waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

PARTS = ("wait", "copy", "launch", "other", "hook")
COLUMNS = (*PARTS, "transfer")
ROOT = "(root)"
RANGES = ("polyshard.", "FSDP::")
WAITS = (
    "polyshard.wait",
    "polyshard.reduced",
    "FSDP::all_gather",  # on CPU torch waits where it starts
    "FSDP::all_gather_copy_out",
    "FSDP::post_backward_reduce",
    "FSDP::post_backward_rs_wait",
)
COPIES = ("copy", "chunk_cat", "aten::cat", "aten::clone")

Parts = dict[str, float]


@dataclass(frozen=True)
class Span:
    """An event of the profiler; times in microseconds."""

    name: str
    start: float
    end: float
    on_worker: bool
    children: list[Span] = field(default_factory=list)

    @property
    def is_range(self) -> bool:
        """Whether an engine labelled it."""
        return self.name.startswith(RANGES)

    @property
    def label_and_group(self) -> tuple[str, str]:
        """``FSDP::pre_forward (blocks.0)`` and ``polyshard.wait blocks.0``, taken apart."""
        label, _, rest = self.name.partition(" ")
        group = rest.removeprefix("for ").removeprefix("(").removesuffix(")")
        return label, ROOT if group in ("", "root") else group


def spans_of(events: Any) -> list[Span]:
    """The profiler's events, with their children."""
    made: dict[int, Span] = {}
    for event in events:
        times = event.time_range
        made[id(event)] = Span(event.name, times.start, times.end, event.is_async)
    for event in events:
        made[id(event)].children.extend(made[id(child)] for child in event.cpu_children)
    return list(made.values())


def parts_by_group(spans: list[Span]) -> dict[str, Parts]:
    """Seconds of every part, and of ``transfer``, by group."""
    found: dict[str, Parts] = {}
    ranges = [span for span in spans if span.is_range]
    for span in ranges:
        label, group = span.label_and_group
        parts = found.setdefault(group, dict.fromkeys(COLUMNS, 0.0))
        inner = 0.0
        for part, micros in _inside(span):
            inner += micros
            if part:
                parts[part] += micros / 1e6
        rest = "wait" if label in WAITS else "hook"
        parts[rest] += max(span.end - span.start - inner, 0.0) / 1e6
    for group, seconds in _transfers(spans, ranges).items():
        found[group]["transfer"] = seconds
    return found


def _inside(span: Span) -> Iterator[tuple[str, float]]:
    """Part and microseconds of what runs in ``span``; an engine's own ranges have no part here."""
    for child in span.children:
        micros = child.end - child.start
        if child.is_range:
            yield "", micros
        elif child.name.startswith("c10d::"):
            yield "launch", micros
        elif any(word in child.name for word in COPIES):
            yield "copy", micros
        else:
            yield "other", micros


def _transfers(spans: list[Span], ranges: list[Span]) -> dict[str, float]:
    """Seconds in which at least one transfer of a group was under way."""
    intervals: dict[str, list[tuple[float, float]]] = {}
    for span in spans:
        if not (span.on_worker and span.name.startswith(("gloo:", "nccl:"))):
            continue
        around = [r for r in ranges if r.start <= span.start <= r.end]
        if around:
            _, group = max(around, key=lambda r: r.start).label_and_group
            intervals.setdefault(group, []).append((span.start, span.end))
    return {group: _union(found) / 1e6 for group, found in intervals.items()}


def _union(intervals: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
