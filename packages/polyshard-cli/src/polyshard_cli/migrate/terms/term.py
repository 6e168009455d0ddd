"""One line of the tables: a name, a keyword or a key of another engine, and what it becomes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Guide", "Table", "Term", "Verdict"]


class Verdict(Enum):
    """What is done about a term; the value is the word of the documentation."""

    MOVED = "moved"
    """The same name, imported from polyshard."""
    REWRITTEN = "rewritten"
    DROPPED = "left out"
    """Nothing corresponds and nothing needs to."""
    TORCH = "torch's"
    """Stays imported from torch, and works."""
    HAND = "by hand"
    """Something corresponds, which only a person can choose."""
    REFUSED = "refused"
    """Nothing corresponds."""

    @property
    def is_left(self) -> bool:
        """Whether the user has to do something."""
        return self in {Verdict.HAND, Verdict.REFUSED}


@dataclass(frozen=True)
class Term:
    """A term of another engine.

    Attributes:
        theirs: how it is written there; within its table no other term has this name.
        verdict: what the tool does.
        ours: what is written instead, or what a person does instead.
        differs: what is not the same afterwards; empty if nothing.
    """

    theirs: str
    verdict: Verdict
    ours: str = ""
    differs: str = ""


@dataclass(frozen=True)
class Table:
    """Terms of one kind: ``title`` is the heading in the documentation."""

    title: str
    terms: tuple[Term, ...]

    def find(self, theirs: str) -> Term | None:
        """The term that is written ``theirs``."""
        return next((term for term in self.terms if term.theirs == theirs), None)


@dataclass(frozen=True)
class Guide:
    """Everything about one engine: tables, and what is the same for all its scripts."""

    name: str
    about: str
    tables: tuple[Table, ...]
