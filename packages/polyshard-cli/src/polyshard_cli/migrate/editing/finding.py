"""What the report says about one line of a script."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Kind"]


class Kind(StrEnum):
    """What a finding asks of the reader."""

    CHANGED = "changed"
    """Done, see the diff."""
    DIFFERS = "differs"
    """Done, or needs no change; something is not as before."""
    HAND = "hand"
    """Left as it is: a person has to choose, or to look."""
    REFUSED = "refused"
    """Left as it is: nothing corresponds."""

    @property
    def is_left(self) -> bool:
        """Whether the user has to do something."""
        return self in {Kind.HAND, Kind.REFUSED}


@dataclass(frozen=True, order=True)
class Finding:
    """One line of the report.

    Attributes:
        line: in the script as it was, or as it is once it was written, from 1; 0 where a
            configuration beside it is meant.
        kind: what it asks of the reader.
        term: the word of the other engine, as tables have it.
        message: what is done or why it is not, a sentence.
        instead: what to do instead; empty where nothing is left.
    """

    line: int
    kind: Kind
    term: str
    message: str
    instead: str = ""
