"""What can be wrong with a comparison."""

from polyshard.errors import PolyshardError

__all__ = ["CompareError", "JobError"]


class CompareError(PolyshardError, ValueError):
    """A comparison that cannot be made as asked; the message says what, where, and what to do."""


class JobError(CompareError):
    """A job that no engine could train: no ``build()``, one that raises, no module, no batch."""
