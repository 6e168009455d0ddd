"""Records of runs: what is in their files, how they are written, read and added up.

[Note: records]
Every rank writes one file for each time the run was started: a line that says what is recorded, and
a line a step. A *part* is a digest of the rows that the rank has; parts of the ranks that share a
tensor add up to the digest of the whole. Tensor-parallel ranks record their pieces under names of
their own. What ranks have whole is the same on all of them, and so is what replicas have: so the
value of an entry is a set of digests, of one if all is well. A run that was started again at step 7
goes on there: what was recorded of later steps before counts no more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from polyshard_reproducible.digests import MASK
from polyshard_reproducible.errors import RecordsError

FORMAT = 1
PHASES = ("parameters", "activations", "gradients", "stepped gradients", "optimizer state")
"""In the order in which a step computes them. Stepped gradients are those the optimizer gets."""


class Key(NamedTuple):
    """What was looked at within a step; ``slot`` is that of an activation, else ``None``."""

    phase: str
    group: str
    name: str
    slot: int | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Of its phase and slot, in the order of computation."""
        return PHASES.index(self.phase), self.slot or 0


class Entry(NamedTuple):
    """One digest of a rank: of a part, or of something whole."""

    key: Key
    is_part: bool
    digest: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """The first line of a file.

    Attributes:
        slots: of a step, over all ranks.
        seed: of random numbers in slots.
        parameters: group, name, shape and dtype of each.
        first: number of the first step in this file.
        started: when, in seconds since 1970.
        rank: who wrote it.
        world_size: how many write.
        replica: ranks of one replica add their parts up.
        torch: its version.
        threads: that kernels may use.
        pieces: tensor-parallel ranks that share a slot; each records what it has.
        format: of the file.
    """

    slots: int
    seed: int
    parameters: list[list[Any]]
    first: int
    started: float
    rank: int
    world_size: int
    replica: int
    torch: str
    threads: int
    pieces: int = 1
    format: int = FORMAT

    @property
    def file_name(self) -> str:
        """Unique in a folder."""
        return f"from-{self.first:06}-rank-{self.rank}-of-{self.world_size}.jsonl"

    def line(self) -> str:
        """As it is written."""
        return json.dumps({"polyshard_records": asdict(self)}) + "\n"


def line_of(step: int, entries: Sequence[Entry]) -> str:
    """A step as it is written."""
    found = [[*e.key, int(e.is_part), f"{e.digest & MASK:016x}"] for e in entries]
    return json.dumps({"step": step, "digests": found}, separators=(",", ":")) + "\n"


Step = Mapping[Key, frozenset[int]]


@dataclass(frozen=True)
class Run:
    """A recorded run: what is the same in all of its files, and the digests of every step."""

    header: Header
    steps: dict[int, Step]
    world_sizes: tuple[int, ...]


def read_run(folder: Path) -> Run:
    """Add up what all ranks have written to ``folder``, of steps that all of them wrote.

    Raises:
        RecordsError: for a folder without records, or with some missing; saying which.
    """
    files = [_read(path) for path in sorted(folder.glob("from-*-rank-*-of-*.jsonl"))]
    if not files:
        raise RecordsError(
            f"{folder} holds no records of a run; give the folder that Recorder(...) wrote to."
        )
    starts: dict[tuple[int, int], list[_File]] = {}
    for file in files:
        starts.setdefault((file.header.first, file.header.world_size), []).append(file)
    steps: dict[int, Step] = {}
    for start in sorted(starts.values(), key=lambda one: max(f.header.started for f in one)):
        _check_whole(folder, start)
        first = start[0].header.first
        steps = {step: found for step, found in steps.items() if step < first}
        steps |= dict(_added(start))
    for file in files[1:]:
        check_same(files[0].header, file.header, f"two starts in {folder}")
    sizes = sorted({f.header.world_size for f in files})
    return Run(files[-1].header, dict(sorted(steps.items())), tuple(sizes))


def check_same(one: Header, other: Header, who: str) -> None:
    """Refuse to compare what was never meant to be equal.

    Raises:
        RecordsError: saying what differs.
    """
    for what in ("slots", "seed"):
        values = getattr(one, what), getattr(other, what)
        if values[0] != values[1]:
            raise RecordsError(
                f"{who} have {what}={values[0]} and {what}={values[1]}, so that their results "
                "differ anyway; record runs with the same Reproducible(...)."
            )
    if one.pieces != other.pieces:
        raise RecordsError(
            f"{who} have {one.pieces} and {other.pieces} tensor-parallel ranks, whose sums are "
            "made in other orders. Compare runs with as many; data-parallel ranks may differ."
        )
    for mine, theirs in zip_longest(one.parameters, other.parameters):
        if mine != theirs:
            raise RecordsError(
                f"{who} are of different models: {_said(mine)} in one, {_said(theirs)} in the "
                "other. Groups, names, shapes and dtypes of parameters have to be the same."
            )


def _said(parameter: list[Any] | None) -> str:
    if parameter is None:
        return "nothing more"
    group, name, shape, dtype = parameter
    return f"'{name}' {shape} {dtype} of group '{group}'"


@dataclass
class _File:
    header: Header
    steps: dict[int, list[Entry]] = field(default_factory=dict)

    def go_on(self, step: int, entries: list[Entry]) -> None:
        """A step was made; one of the same number or a later one was rolled back before."""
        self.steps = {s: found for s, found in self.steps.items() if s < step}
        self.steps[step] = entries


def _read(path: Path) -> _File:
    """One rank's file; a last line that a crash cut short is left out.

    Raises:
        RecordsError: naming the file.
    """
    try:
        first, *lines = path.read_text("utf-8").splitlines(keepends=True)
        given = json.loads(first)["polyshard_records"]
        if given.get("format") != FORMAT:
            raise RecordsError(
                f"{path} has format {given.get('format')}; this version reads {FORMAT}."
            )
        file = _File(Header(**given))
        for line in lines:
            if line.endswith("\n"):
                found = json.loads(line)
                file.go_on(found["step"], [_entry(*values) for values in found["digests"]])
    except RecordsError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordsError(
            f"{path} is no record of a run ({type(error).__name__}: {error}); was it cut short or "
            "written by something else?"
        ) from error
    return file


def _entry(phase: str, group: str, name: str, slot: int | None, part: int, digest: str) -> Entry:
    return Entry(Key(phase, group, name, slot), bool(part), int(digest, 16))


def _check_whole(folder: Path, start: Sequence[_File]) -> None:
    header = start[0].header
    missing = sorted(set(range(header.world_size)) - {f.header.rank for f in start})
    if missing:
        raise RecordsError(
            f"{folder}: of the {header.world_size} ranks that ran from step {header.first} on, "
            f"records of {missing} are missing; their parts of every tensor are in them. Put the "
            "files of all ranks into one folder."
        )


def _added(start: Sequence[_File]) -> Iterator[tuple[int, Step]]:
    """Every step that all ranks have written, in the order of computation."""
    ranks = sorted(start, key=lambda file: file.header.rank)
    for step in sorted(set.intersection(*(set(f.steps) for f in ranks))):
        parts: dict[Key, dict[int, int]] = {}
        wholes: dict[Key, set[int]] = {}
        order: dict[Key, int] = {}
        for file in ranks:
            for place, (key, is_part, digest) in enumerate(file.steps[step]):
                wholes.setdefault(key, set())
                order.setdefault(key, place)
                if is_part:
                    sums = parts.setdefault(key, {})
                    replica = file.header.replica
                    sums[replica] = (sums.get(replica, 0) + digest) & MASK
                else:
                    wholes[key].add(digest)
        keys = sorted(wholes, key=lambda key: (key.place, order[key]))  # stable: then by rank
        yield step, {k: frozenset({*wholes[k], *parts.get(k, {}).values()}) for k in keys}
