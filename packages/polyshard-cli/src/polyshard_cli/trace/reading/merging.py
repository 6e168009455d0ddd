"""Puts the files of all ranks into one, a process per rank, in rank 0's clock."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from polyshard.files import replacing
from polyshard_cli.trace.clocks.offset import Timeline
from polyshard_cli.trace.errors import TraceError
from polyshard_cli.trace.events import SCHEMA, micros
from polyshard_cli.trace.reading.ranks import Event, RankFile, rank_files

__all__ = ["Alignment", "Merged", "merge"]


@dataclass(frozen=True)
class Alignment:
    """How one rank's clock was aligned with rank 0's; times in microseconds.

    ``uncertainty_us`` bounds the error where clocks drift evenly; ``None`` where clocks were not
    compared, and wall clocks had to do. ``drift_ppm`` is what rank 0's clock gains, in millionths.
    """

    rank: int
    host: str
    offset_us: float
    uncertainty_us: float | None
    drift_ppm: float
    events: int


@dataclass(frozen=True)
class Merged:
    """What became of a folder."""

    path: Path
    world_size: int
    ranks: tuple[Alignment, ...]

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of which there is no file."""
        return tuple(sorted(set(range(self.world_size)) - {one.rank for one in self.ranks}))


def merge(folder: str | Path, path: str | Path) -> Merged:
    """Write one file for Perfetto, in which times are of rank 0's clock and start near 0.

    Args:
        folder: what ``Trace(folder)`` wrote.
        path: the file to make; one that is there is replaced.

    Raises:
        TraceError: where there is nothing to read, or no room to write.
    """
    files = rank_files(Path(folder))
    path = Path(path)
    try:
        with replacing(path) as file:
            ranks = _write(files, codecs.getwriter("ascii")(file))
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror}") from error
    return Merged(path, files[0].world_size, ranks)


def _write(files: Sequence[RankFile], out: codecs.StreamWriter) -> tuple[Alignment, ...]:
    reference = files[0]
    lines = {file.rank: file.timeline(reference) for file in files}
    start = min(lines[file.rank].reference_ns(file.opened_ns) for file in files)
    out.write('{"displayTimeUnit": "ms", "traceEvents":[\n')
    between = ""
    done = []
    for file in files:
        count = 0
        for event in file.events():
            out.write(between + _shifted(event, lines[file.rank], start))
            between = ",\n"
            count += event["ph"] == "X"
        done.append(_alignment(file, lines[file.rank], count))
    head = {"polyshard_trace": SCHEMA, "merged": [asdict(one) for one in done]}
    out.write(f'\n], "otherData": {json.dumps(head)}}}\n')
    return tuple(done)


def _alignment(file: RankFile, line: Timeline, count: int) -> Alignment:
    return Alignment(
        rank=file.rank,
        host=file.host,
        offset_us=line.first.offset_ns / 1e3,
        uncertainty_us=line.uncertainty_ns / 1e3 if file.offsets else None,
        drift_ppm=1e6 * line.drift,
        events=count,
    )


def _shifted(event: Event, line: Timeline, start: int) -> str:
    """The event in the reference's clock; a begin and an end are moved each by its own offset."""
    if "ts" not in event:
        return json.dumps(event, separators=(",", ":"))
    begin = round(1000 * event.pop("ts"))
    moved = line.reference_ns(begin)
    times = f'"ts":{micros(moved - start)}'
    if "dur" in event:
        end = line.reference_ns(begin + round(1000 * event.pop("dur")))
        times += f',"dur":{micros(max(0, end - moved))}'
    return f"{json.dumps(event, separators=(',', ':'))[:-1]},{times}}}"
