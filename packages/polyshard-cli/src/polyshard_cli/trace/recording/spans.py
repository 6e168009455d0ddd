"""Spans that are open, and those that ended and are not written yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from polyshard_cli.trace.events import Kind, Span

__all__ = ["Spans"]

Args = dict[str, object]


@dataclass(slots=True)
class _Open:
    begin_ns: int
    lane: int
    args: Args


class Spans:
    """Pairs begins with ends. An end that nothing began (tracing was off) is passed over."""

    def __init__(self, clock: Callable[[], int], ended: Callable[[Span], None]) -> None:
        """``clock`` gives nanoseconds; ``ended`` is called with each span."""
        self._clock = clock
        self._ended = ended
        self._open: dict[tuple[Kind, str], list[_Open]] = {}
        self._lanes: dict[Kind, set[int]] = {}

    def begin(self, kind: Kind, name: str, args: Args, at_ns: int | None = None) -> None:
        """Something begins, or began at ``at_ns``, on the lowest lane of its kind that is free."""
        taken = self._lanes.setdefault(kind, set())
        lane = 0
        if kind is not Kind.FORWARD:  # calls nest on one lane
            lane = next(i for i in range(len(taken) + 1) if i not in taken)
            taken.add(lane)
        opened = _Open(self._clock() if at_ns is None else at_ns, lane, args)
        self._open.setdefault((kind, name), []).append(opened)

    def end(self, kind: Kind, name: str, **args: object) -> None:
        """It ends: the last that began of forwards, else the first."""
        waiting = self._open.get((kind, name))
        if waiting:
            opened = waiting.pop(-1 if kind is Kind.FORWARD else 0)
            self._close(kind, name, opened, args)

    def is_open(self, kind: Kind, name: str) -> bool:
        """Whether one of this name is."""
        return bool(self._open.get((kind, name)))

    def past(self, kind: Kind, name: str, seconds: float, args: Args) -> None:
        """Something ends now that took so long, of which no begin was told."""
        now = self._clock()
        self._ended(Span(kind, name, now - int(1e9 * seconds), now, 0, args))

    def end_all(self) -> None:
        """End what is open, inner ones first; its end will not be told."""
        found = [(o, *key) for key, waiting in self._open.items() for o in waiting]
        self._open.clear()
        for opened, kind, name in sorted(found, key=lambda f: -f[0].begin_ns):
            self._close(kind, name, opened, {"broken": True})

    def _close(self, kind: Kind, name: str, opened: _Open, args: Args) -> None:
        self._lanes[kind].discard(opened.lane)
        begin, lane = opened.begin_ns, opened.lane
        self._ended(Span(kind, name, begin, self._clock(), lane, opened.args | args))
