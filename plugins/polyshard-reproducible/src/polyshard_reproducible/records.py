"""Records of runs: what is in their files, how they are written, read and added up.

[Note: records]
Every rank writes one file for each time the run was started: a line that says what is recorded, and
a line a step. A *part* is a digest of the rows that the rank has; parts of the ranks that share a
tensor add up to the digest of the whole. Tensor-parallel ranks record their pieces under names of
their own. What ranks have whole is the same on all of them, and so is what replicas have: so the
value of an entry is a set of digests, of one if all is well. A run that was started again at step 7
continues there: what was recorded of later steps before counts no more.

[Note: starts that failed]
A rank opens its file when its first step begins, before it meets any other rank: so a line of one
rank means that all have opened theirs. A rank that died before that has none, and no step of that
start is whole. That is an error only where steps would be missing: not if a later start was made at
the same step or before, and not if the start is the last one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
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
        rank: the one that wrote it.
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

    def __post_init__(self) -> None:
        """Refuse what a damaged file may say."""
        kinds = {"int": int, "float": int | float, "str": str, "list[list[Any]]": list}
        for one in fields(self):
            if not isinstance(getattr(self, one.name), kinds[str(one.type)]):
                raise TypeError(f"{one.name} is {getattr(self, one.name)!r}")

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
    """A recorded run: what is the same in all of its files, and the digests of every step.

    ``world_sizes`` are of the starts that count, ``notes`` say which do not.
    """

    header: Header
    steps: dict[int, Step]
    world_sizes: tuple[int, ...]
    notes: tuple[str, ...] = ()


def read_run(folder: Path) -> Run:
    """Add up what all ranks have written to ``folder``, of steps that all of them wrote.

    Raises:
        RecordsError: for a folder without records, or with some missing that steps are in; saying
            which.
    """
    read = [_read(path) for path in sorted(folder.glob("from-*-rank-*-of-*.jsonl"))]
    files = [file for file in read if file is not None]
    if not files:
        raise RecordsError(
            f"{folder} holds no records of a run; give the folder that Recorder(...) wrote to."
        )
    for file in files[1:]:
        check_same(files[0].header, file.header, f"two starts in {folder}")
    starts: dict[tuple[int, int], list[_File]] = {}
    for file in files:
        starts.setdefault((file.header.first, file.header.world_size), []).append(file)
    ordered = [_Start(one) for one in starts.values()]
    counting, notes = _counting(folder, sorted(ordered, key=lambda start: start.started))
    steps: dict[int, Step] = {}
    for start in counting:
        steps = {step: found for step, found in steps.items() if step < start.header.first}
        steps |= dict(_added(start.files))
    sizes = sorted({start.header.world_size for start in counting})
    return Run(counting[-1].header, dict(sorted(steps.items())), tuple(sizes), tuple(notes))


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


@dataclass(frozen=True)
class _Start:
    """What the ranks that ran from one step on have left."""

    files: list[_File]

    @property
    def header(self) -> Header:
        return self.files[0].header

    @property
    def started(self) -> float:
        return max(file.header.started for file in self.files)

    @property
    def missing(self) -> list[int]:
        return sorted(set(range(self.header.world_size)) - {f.header.rank for f in self.files})

    @property
    def may_have_died(self) -> bool:
        """Whether who is missing can have; a host that is lost takes what was not on disk along."""
        return all(step <= self.header.first + 1 for file in self.files for step in file.steps)

    def said(self) -> str:
        header = self.header
        return (
            f"of the {header.world_size} ranks that ran from step {header.first} on, records of "
            f"{self.missing} are missing"
        )


def _counting(folder: Path, starts: Sequence[_Start]) -> tuple[list[_Start], list[str]]:
    """Those of ``starts``, in order, that steps are taken from; and what is to be said of others.

    Raises:
        RecordsError: where steps would be missing. See [Note: starts that failed].
    """
    found: list[_Start] = []
    left_out: list[_Start] = []
    for start in reversed(starts):
        if found and start.header.first >= found[-1].header.first:
            continue  # all of it was made again
        if not start.missing:
            found.append(start)
        elif found or not start.may_have_died:
            raise _incomplete(folder, start)
        else:
            left_out.append(start)
    if not found:
        raise _incomplete(folder, left_out[0])
    return found[::-1], [f"{folder}: {start.said()}; that start is left out" for start in left_out]


def _incomplete(folder: Path, start: _Start) -> RecordsError:
    return RecordsError(
        f"{folder}: {start.said()}; their parts of every tensor are in them. Put the files of all "
        "ranks into one folder."
    )


def _read(path: Path) -> _File | None:
    """One rank's file; a last line that a crash cut short is left out, ``None`` if it is the first.

    Raises:
        RecordsError: naming the file.
    """
    try:
        first, *lines = path.read_text("utf-8").splitlines(keepends=True) or [""]
        if not first.endswith("\n"):
            return None
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
    given: list[Any] = [phase, group, name, slot]  # which a damaged file may have of any kind
    is_named = all(isinstance(each, str) for each in given[:3])
    if not is_named or phase not in PHASES or not isinstance(given[3], int | None):
        raise ValueError(f"{given} is no place of a digest")
    return Entry(Key(phase, group, name, slot), bool(part), int(digest, 16))


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
