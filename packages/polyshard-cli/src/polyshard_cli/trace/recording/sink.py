"""Where ended spans go: a buffer of some thousands, then the file."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from polyshard_cli.trace.clocks.offset import Offset
from polyshard_cli.trace.clocks.ranks import Ranks
from polyshard_cli.trace.events import (
    CLOCK,
    SCHEMA,
    Kind,
    Span,
    instant_line,
    process_lines,
    track_lines,
)
from polyshard_cli.trace.recording.lines import LineFile, path_of

__all__ = ["Sink"]

BUFFERED = 4096
"""Spans that wait to be written, at most: about a mebibyte."""


class Sink:
    """This rank's file, opened when first needed, and what is not written to it yet.

    It is over when it was closed or a write failed; nothing more is written then, so that the next
    step of a loop that continues is not broken off for the same reason again.
    """

    def __init__(self, folder: Path, clock: Callable[[], int]) -> None:
        """Nothing is made yet."""
        self._folder = folder
        self._clock = clock
        self._file: LineFile | None = None
        self._rank = 0
        self.is_over = False
        self._waiting: list[Span] = []
        self._tracks: set[tuple[Kind, int]] = set()

    @property
    def path(self) -> Path:
        """The file, whether or not it is there."""
        return path_of(self._folder, Ranks.current().rank)

    def open(self) -> None:
        """Make the file, unless it is there or over.

        Raises:
            TraceError: where it cannot be written.
        """
        if self._file is not None or self.is_over:
            return
        ranks, host, now = Ranks.current(), platform.node(), self._clock()
        self._rank = ranks.rank  # the process group may end before this does
        head = {
            "polyshard_trace": SCHEMA,
            "rank": ranks.rank,
            "world_size": ranks.size,
            "host": host,
            "opened_ns": now,
            "opened_wall_ns": time.time_ns(),
        }
        self.is_over = True  # should this fail
        self._file = LineFile(self.path, head, process_lines(ranks.rank, host))
        self.is_over = False

    def take(self, span: Span) -> None:
        """Keep it for the next write.

        Raises:
            TraceError: where there is no room left, and writing fails.
        """
        if self._file is None:
            return
        self._waiting.append(span)
        if len(self._waiting) >= BUFFERED:
            self.flush()

    def note(self, run: str, offset: Offset) -> None:
        """Write what is known of the clock, and a name of the run that all ranks share.

        Raises:
            TraceError: where that fails.
        """
        self._add([instant_line(CLOCK, self._rank, offset.at_ns, {"run": run, **asdict(offset)})])

    def flush(self) -> None:
        """Write what waits.

        Raises:
            TraceError: where that fails.
        """
        spans, self._waiting = self._waiting, []
        lines: list[str] = []
        for span in spans:
            if (span.kind, span.lane) not in self._tracks:
                self._tracks.add((span.kind, span.lane))
                lines += track_lines(span.kind, span.lane, self._rank)
            lines.append(span.line(self._rank))
        self._add(lines)

    def _add(self, lines: list[str]) -> None:
        if self._file is None:
            return
        try:
            self._file.add(lines)
        except Exception:
            self._let_go()
            raise

    def close(self) -> None:
        """Write what waits, and close the file.

        Raises:
            TraceError: where that fails.
        """
        self.flush()
        self._let_go()

    def _let_go(self) -> None:
        file, self._file = self._file, None
        self.is_over = True
        if file is not None:
            file.close()
