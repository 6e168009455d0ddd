"""Errors and warnings of attempts and guards."""

from __future__ import annotations

from polyshard.errors import PolyshardError


class AttemptError(PolyshardError, RuntimeError):
    """An attempt failed on some rank; raised on every rank.

    Attributes:
        ranks: the ranks that are known to have failed.
        is_out_of_memory: whether one of them ran out of memory.
        is_gone: whether one of them has died.
        is_undone: whether this rank has the state from before the attempt.
    """

    ranks: tuple[int, ...] = ()
    is_out_of_memory = is_gone = False
    is_undone = True


class ResizeError(AttemptError):
    """Resizing failed on some rank; raised on every rank, which has the model that it had."""


class CorruptionError(PolyshardError, RuntimeError):
    """Weights or optimizer state changed without a write, or replicas differ."""


class SkippedStepWarning(UserWarning):
    """All ranks skipped a step of the optimizer; the message has the reason."""
