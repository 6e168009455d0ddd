"""Errors and warnings of attempts and guards."""

from __future__ import annotations

from polyshard.errors import PolyshardError


class AttemptError(PolyshardError, RuntimeError):
    """An attempt failed on some rank; raised on every rank alike.

    Attributes:
        ranks: those that failed, as far as it is known.
        is_out_of_memory: whether one of them ran out of memory.
        is_gone: whether one of them will not come back.
        is_undone: whether this rank is where it was before the attempt.
    """

    ranks: tuple[int, ...] = ()
    is_out_of_memory = is_gone = False
    is_undone = True


class CorruptionError(PolyshardError, RuntimeError):
    """Weights or optimizer state that changed though nobody wrote them, or replicas that differ."""


class SkippedStepWarning(UserWarning):
    """A step of the optimizer that all ranks left out; the message says why."""
