"""Two recorded runs, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from polyshard_reproducible.errors import RecordsError
from polyshard_reproducible.records import Key, Run, Step, check_same, read_run


@dataclass(frozen=True)
class Difference:
    """Something that is not the same in two runs.

    Attributes:
        step: its number.
        key: phase, group and name; the slot of an activation.
        why: what is wrong with it, in words.
    """

    step: int
    key: Key
    why: str

    def __str__(self) -> str:
        """In one line."""
        slot = "" if self.key.slot is None else f" of slot {self.key.slot}"
        key = self.key
        return f"step {self.step}, {key.phase}{slot}, group '{key.group}': {key.name} {self.why}"


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common.

    Attributes:
        steps: that both have.
        groups: in the order of the model.
        compared: how many digests were.
        differences: all of them, in the order of computation.
        notes: what else is not the same, and may be the reason; records that were left out.
    """

    steps: tuple[int, ...]
    groups: tuple[str, ...]
    compared: int
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def first(self) -> Difference | None:
        """Where to look; ``None`` for runs that are equal."""
        return self.differences[0] if self.differences else None

    def at(self, step: int) -> tuple[Difference, ...]:
        """The differences of one step."""
        return tuple(d for d in self.differences if d.step == step)

    def to_plain(self) -> dict[str, Any]:
        """JSON-ready data."""
        first = self.first
        cells = dict.fromkeys((d.step, d.key.phase, d.key.group) for d in self.differences)
        return {
            "equal": first is None,
            "steps": [self.steps[0], self.steps[-1]],
            "compared": self.compared,
            "first": first and {"step": first.step, **first.key._asdict(), "why": first.why},
            "differences": [list(cell) for cell in cells],
            "notes": list(self.notes),
        }


def compare(one: str | PathLike[str], other: str | PathLike[str]) -> Comparison:
    """Read two folders of :class:`polyshard_reproducible.Recorder`, and compare step by step.

    Raises:
        RecordsError: for folders that hold no records; for records of different models, slots or
            seeds, or without a common step.
    """
    runs = read_run(Path(one)), read_run(Path(other))
    check_same(runs[0].header, runs[1].header, f"the runs in {one} and {other}")
    steps = tuple(sorted(runs[0].steps.keys() & runs[1].steps.keys()))
    if not steps:
        raise RecordsError(
            f"the runs in {one} and {other} have no step in common: {_range(runs[0])}, and "
            f"{_range(runs[1])}."
        )
    pairs = [(step, runs[0].steps[step], runs[1].steps[step]) for step in steps]
    found = [Difference(s, key, why) for s, a, b in pairs for key, why in _differing(a, b)]
    compared = sum(len(a.keys() & b.keys()) for _, a, b in pairs)
    return Comparison(steps, _groups(runs[0]), compared, tuple(found), tuple(_notes(*runs)))


def _differing(one: Step, other: Step) -> Iterator[tuple[Key, str]]:
    """In the order of computation; a phase that only one run has recorded is left out."""
    phases = {k.phase for k in one} & {k.phase for k in other}
    for key in _merged(one, other):
        if key.phase not in phases:
            continue
        values = one.get(key), other.get(key)
        if None in values:
            yield key, f"is only in the {'first' if values[1] is None else 'second'} run"
        elif len(values[0] or ()) > 1 or len(values[1] or ()) > 1:
            which = "first" if len(values[0] or ()) > 1 else "second"
            yield key, f"is not the same on all ranks of the {which} run that have it"
        elif values[0] != values[1]:
            yield key, "differs"


def _merged(one: Step, other: Step) -> list[Key]:
    """All keys; what only the second has comes last within its phase and slot."""
    keys = [*one, *(key for key in other if key not in one)]
    return sorted(keys, key=lambda key: key.place)  # stable


def _groups(run: Run) -> tuple[str, ...]:
    """In the order of parameters, and others as they come."""
    of_parameters = [str(group) for group, *_ in run.header.parameters]
    others = [key.group for step in run.steps.values() for key in step]
    return tuple(dict.fromkeys([*of_parameters, *others]))


def _notes(one: Run, other: Run) -> Iterator[str]:
    yield from (*one.notes, *other.notes)
    for what in ("torch", "threads"):
        values = getattr(one.header, what), getattr(other.header, what)
        if values[0] != values[1]:
            yield f"{what}: {values[0]} in the first run, {values[1]} in the second"


def _range(run: Run) -> str:
    return f"steps {min(run.steps)} to {max(run.steps)}" if run.steps else "no whole step"
