"""A step that all ranks make, or none: how it went for all, and the way back. See attempt()."""

from polyshard.rollback.attempt import Attempt, attempt, attempts

__all__ = ["Attempt", "attempt", "attempts"]
