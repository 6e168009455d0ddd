"""The order of forwards, recorded once and replayed: whose gather to start while another computes.

[Note: replay]
The first forward of a root only records. Later ones follow the record: when a unit has been
gathered, the gather of the one that came next last time starts, and runs while the unit computes.
When a forward departs from its record, nothing is started early until it ends, and its own order is
what the next one follows. What was gathered early stays until it is used or the root's forward has
ended, so that a unit is gathered once in a forward whether or not it was foreseen. Ranks that run
their units in the same order therefore gather in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyshard.engine.unit import Unit


class Replay:
    """See [Note: replay]. One record for each unit that is ever called from outside."""

    def __init__(self) -> None:
        """Nothing is recorded."""
        self._records: dict[Unit, list[Unit]] = {}
        self._caller: Unit | None = None
        self._current: list[Unit] = []
        self._expected: list[Unit] = []
        self._early: set[Unit] = set()

    def begin(self, caller: Unit) -> None:
        """The forward of ``caller`` starts, from outside of any other."""
        self._caller = caller
        self._current = []
        self._expected = self._records.get(caller, [])

    def enter(self, unit: Unit) -> Unit | None:
        """``unit`` runs forward; returns the unit that is expected next, if any."""
        position = len(self._current)
        self._current.append(unit)
        self._early.discard(unit)
        if position >= len(self._expected) or self._expected[position] is not unit:
            self._expected = []
        return self._expected[position + 1] if position + 1 < len(self._expected) else None

    def note_early(self, unit: Unit) -> None:
        """The gather of ``unit`` was started before it runs."""
        self._early.add(unit)

    def end(self) -> list[Unit]:
        """The outer forward has ended; returns units gathered early that never ran."""
        if self._caller is not None:
            self._records[self._caller] = self._current
        unused = list(self._early)
        self.reset()
        return unused

    def reset(self) -> None:
        """Forget the forward under way, if any; records stay."""
        self._caller = None
        self._current, self._expected = [], []
        self._early.clear()
