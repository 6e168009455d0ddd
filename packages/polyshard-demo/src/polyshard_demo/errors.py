"""What can go wrong in a training run, as seen by the person who started it."""

from polyshard.errors import PolyshardError

__all__ = ["DemoError", "RankError"]


class DemoError(PolyshardError, ValueError):
    """A setting, text or checkpoint that cannot be used; the message names it and the fix."""


class RankError(PolyshardError, RuntimeError):
    """A rank died; the message quotes the traceback of the rank that failed first."""
