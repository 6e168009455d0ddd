"""Adds up spans by unit and kind."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from polyshard_cli.trace.errors import TraceError
from polyshard_cli.trace.events import MOVES, Kind
from polyshard_cli.trace.reading.ranks import Event, rank_files

__all__ = ["Row", "Summary", "summarize"]

_SHOWN = [kind for kind in Kind if kind not in (Kind.STEP, Kind.WAIT)]
_HOST_WAITS = (Kind.REPLICAS, Kind.STAGING)  # all of their time is the host's


@dataclass
class Row:
    """One kind of span of one unit or group, added up over steps and ranks.

    Seconds of a transfer are from its start until it was waited for; ``waited_seconds`` is the part
    of that in which nothing else could run (``None`` for compute). ``sent_bytes`` left the ranks;
    of sums over replicas and of staging it is what was summed or moved.
    """

    name: str
    kind: str
    calls: int = 0
    seconds: float = 0.0
    waited_seconds: float | None = None
    sent_bytes: int | None = None

    @property
    def bytes_per_second(self) -> float | None:
        """How fast bytes went, while they went; ``None`` where none did."""
        if not self.sent_bytes or not self.seconds:
            return None
        return self.sent_bytes / self.seconds

    def add(self, event: Event) -> None:
        """Count one more."""
        seconds, args = event["dur"] / 1e6, event["args"]
        self.calls += 1
        self.seconds += seconds
        if self.kind in MOVES:
            waited = seconds if self.kind in _HOST_WAITS else args.get("wait_us", 0.0) / 1e6
            self.waited_seconds = (self.waited_seconds or 0.0) + waited
            self.sent_bytes = (self.sent_bytes or 0) + args["bytes"]


@dataclass(frozen=True)
class Summary:
    """What a folder holds; ``steps`` are those that were recorded, on the rank that has most."""

    ranks: int
    steps: int
    rank_steps: int
    """Of all ranks together: some may have recorded fewer."""
    step_seconds: float
    """All steps of all ranks added up, from the first event of each to that of the next."""
    kinds: tuple[Row, ...]
    rows: tuple[Row, ...] = field(default=())

    def to_plain(self) -> dict[str, Any]:
        """JSON-ready."""
        plain = asdict(self)
        for name in ("kinds", "rows"):
            for row, found in zip(plain[name], getattr(self, name), strict=True):
                row["bytes_per_second"] = found.bytes_per_second
        return plain


def summarize(folder: str | Path, *, rank: int | None = None) -> Summary:
    """Add up what ``Trace(folder)`` wrote, on all ranks or on one.

    Raises:
        TraceError: where there is nothing to read, or not of that rank.
    """
    kinds = {str(kind): Row("all", str(kind)) for kind in _SHOWN}
    rows: dict[tuple[str, str], Row] = {}
    found = rank_files(Path(folder))
    files = [file for file in found if rank in (None, file.rank)]
    if not files:
        there = ", ".join(str(file.rank) for file in found)
        raise TraceError(f"{folder} has no trace of rank {rank}; it has those of {there}")
    steps, rank_steps, step_seconds = 0, 0, 0.0
    for file in files:
        own = 0
        for event in file.spans():
            kind = event["cat"]
            if kind == Kind.STEP:
                own, step_seconds = own + 1, step_seconds + event["dur"] / 1e6
            if kind in kinds:
                kinds[kind].add(event)
                rows.setdefault((event["name"], kind), Row(event["name"], kind)).add(event)
        steps, rank_steps = max(steps, own), rank_steps + own
    return Summary(
        ranks=len(files),
        steps=steps,
        rank_steps=rank_steps,
        step_seconds=step_seconds,
        kinds=tuple(row for row in kinds.values() if row.calls),
        rows=tuple(sorted(rows.values(), key=_order)),
    )


def _order(row: Row) -> tuple[float, float]:
    return -(row.waited_seconds or 0.0), -row.seconds
