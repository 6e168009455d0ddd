"""Which rank holds which rows before and after: arithmetic without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from polyshard.errors import SettingError
from polyshard.sharding.layout import chunk_bounds


@dataclass(frozen=True)
class Seats:
    """The places of ranks on the shard axis, by their numbers in the group of all that take part.

    Attributes:
        before: the place of each rank now; ``None`` for one that holds nothing.
        after: the place that it will have.

    Raises:
        SettingError: when these are not the places of one axis each.
    """

    before: tuple[int | None, ...]
    after: tuple[int | None, ...]

    def __post_init__(self) -> None:
        for what, places in (("holds the model now", self.before), ("is to hold it", self.after)):
            found = sorted(place for place in places if place is not None)
            if not found or found != list(range(len(found))):
                raise SettingError(
                    f"no one set of ranks {what}: of all that take part, they have the places "
                    f"{list(places)}. A rank that joins brings its model on the meta device; ranks "
                    "that stay or join pass the same group, and ranks that leave pass None."
                )

    @cached_property
    def holders(self) -> list[int]:
        """Ranks that hold the model now, by their places."""
        return _by_place(self.before)

    @cached_property
    def heirs(self) -> list[int]:
        """Ranks that will hold it, by their places."""
        return _by_place(self.after)

    def held(self, extent: int, rank: int) -> tuple[int, int]:
        """The rows of ``rank`` now, of ``extent``: a half-open range."""
        return _rows(extent, len(self.holders), self.before[rank])

    def wanted(self, extent: int, rank: int) -> tuple[int, int]:
        """The rows that it will have."""
        return _rows(extent, len(self.heirs), self.after[rank])

    def shared(self, extent: int, source: int, target: int) -> tuple[int, int]:
        """The rows that ``source`` holds and ``target`` will have; empty if there are none."""
        held, wanted = self.held(extent, source), self.wanted(extent, target)
        start = max(held[0], wanted[0])
        return start, max(start, min(held[1], wanted[1]))

    def gives_whole(self, source: int, target: int) -> bool:
        """Whether ``target`` gets from ``source`` what every holder has whole."""
        if self.after[target] is None:
            return False
        if self.before[target] is not None:
            return source == target
        return source == self.holders[target % len(self.holders)]


def _by_place(places: Sequence[int | None]) -> list[int]:
    found = {place: rank for rank, place in enumerate(places) if place is not None}
    return [found[place] for place in sorted(found)]


def _rows(extent: int, size: int, place: int | None) -> tuple[int, int]:
    return (0, 0) if place is None else chunk_bounds(extent, size, place)
