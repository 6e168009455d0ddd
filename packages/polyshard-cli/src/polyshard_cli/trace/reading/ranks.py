"""Reads the files that ranks wrote, also those of ranks that were killed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyshard_cli.trace.clocks.offset import Offset, Timeline
from polyshard_cli.trace.errors import TraceError
from polyshard_cli.trace.events import CLOCK, SCHEMA

__all__ = ["Event", "RankFile", "rank_files"]

Event = dict[str, Any]
"""One event of the format, as it was written."""

_LISTED = '"traceEvents":['


@dataclass(frozen=True)
class RankFile:
    """What one rank wrote, and how its clock stands to rank 0's."""

    path: Path
    rank: int
    world_size: int
    host: str
    run: str
    """A name that all ranks of a recording share; empty without one."""
    opened_ns: int
    """When it began, by its own clock."""
    wall_ns: int
    """The same by the wall clock, which is all there is without a recording."""
    offsets: tuple[Offset, ...]

    @classmethod
    def read(cls, path: Path) -> RankFile:
        """Read the head, and what is known of the clock.

        Raises:
            TraceError: for a file that is no trace of one rank.
        """
        with _opened(path) as lines:
            head = _head(path, next(lines, ""))
        notes = [e["args"] for e in _events(path) if e["name"] == CLOCK]
        return cls(
            path=path,
            rank=head["rank"],
            world_size=head["world_size"],
            host=head["host"],
            run="".join(note["run"] for note in notes),
            opened_ns=head["opened_ns"],
            wall_ns=head["opened_wall_ns"],
            offsets=tuple(
                Offset(note["at_ns"], note["offset_ns"], note["uncertainty_ns"]) for note in notes
            ),
        )

    def events(self) -> Iterator[Event]:
        """Everything in it, line by line; a last line that was torn is left out."""
        return _events(self.path)

    def spans(self) -> Iterator[Event]:
        """Its events that have durations."""
        return (event for event in self.events() if event["ph"] == "X")

    def timeline(self, reference: RankFile) -> Timeline:
        """From this rank's clock to rank 0's; by wall clocks where they were not compared."""
        if self.offsets:
            return Timeline(self.offsets)
        by_wall = (self.wall_ns - self.opened_ns) - (reference.wall_ns - reference.opened_ns)
        return Timeline([Offset(self.opened_ns, by_wall, 0)])


def rank_files(folder: Path) -> list[RankFile]:
    """Those of one run, by rank.

    Raises:
        TraceError: where there are none, or of several runs.
    """
    paths = sorted(folder.glob("rank*.json"))
    if not paths:
        raise TraceError(
            f"{folder} has no rank0.json, rank1.json, ...; give the folder that Trace(folder) had, "
            "after ranks of all hosts wrote or were copied there"
        )
    files = sorted((RankFile.read(path) for path in paths), key=lambda f: f.rank)
    _check_one_run(files)
    return files


def _check_one_run(files: Sequence[RankFile]) -> None:
    first = files[0]
    for other in files[1:]:
        if (other.run, other.world_size) != (first.run, first.world_size):
            raise TraceError(
                f"{other.path} and {first.path} are of different runs (of {other.world_size} and "
                f"{first.world_size} ranks); keep those of one run in a folder"
            )
        if other.rank == first.rank:
            raise TraceError(f"{other.path} and {first.path} are both of rank {first.rank}")
        first = other


def _opened(path: Path) -> Any:
    try:
        return path.open(encoding="ascii", errors="replace")
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error


def _head(path: Path, line: str) -> Event:
    try:
        head: Event = json.loads(line.rstrip()[: -len(_LISTED)].rstrip(", ") + "}")["otherData"]
        if head["polyshard_trace"] != SCHEMA:
            raise ValueError(f"schema {head['polyshard_trace']}, this version reads {SCHEMA}")
        for key in ("rank", "world_size", "host", "opened_ns", "opened_wall_ns"):
            head[key]
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(
            f"{path} is not a trace of one rank ({type(error).__name__}: {error}); give what "
            "Trace(folder) wrote, not what merge made of it"
        ) from error
    return head


def _events(path: Path) -> Iterator[Event]:
    with _opened(path) as lines:
        next(lines, "")
        for line in lines:
            text = line.strip().removesuffix(",")
            if text.startswith("]"):
                return
            try:
                event = json.loads(text)
            except ValueError:
                return  # killed while it wrote
            yield event
