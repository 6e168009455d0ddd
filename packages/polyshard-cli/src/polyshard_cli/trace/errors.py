"""What can be wrong with a trace."""

from polyshard.errors import PolyshardError

__all__ = ["TraceError"]


class TraceError(PolyshardError, ValueError):
    """A trace that cannot be written or read; the message says where, why, and what to do."""
