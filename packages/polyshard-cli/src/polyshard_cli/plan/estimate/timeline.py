"""When each part of a step runs, lane by lane: what a picture of the step is drawn from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Lane = Literal["compute", "gathers", "reductions"]
LANES: tuple[Lane, ...] = ("compute", "gathers", "reductions")


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


class Timeline:
    """Spans as they are found; those of one lane follow one another."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._last: dict[Lane, int] = {}

    def add(self, lane: Lane, unit: str, phase: str, start: float, end: float) -> None:
        """One more, unless it takes no time."""
        if end > start:
            self._last[lane] = len(self._spans)
            self._spans.append(Span(lane, unit, phase, start, end))

    def stretch(self, lane: Lane, end: float) -> None:
        """What is under way on ``lane`` ends later than it was said to."""
        index = self._last[lane]
        self._spans[index] = replace(self._spans[index], end=end)

    @property
    def spans(self) -> tuple[Span, ...]:
        """All of them, by their start."""
        return tuple(sorted(self._spans, key=lambda span: (span.start, LANES.index(span.lane))))
