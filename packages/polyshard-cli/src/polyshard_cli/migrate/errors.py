"""What can be wrong with what is to be migrated."""

from polyshard.errors import PolyshardError

__all__ = ["MigrateError"]


class MigrateError(PolyshardError, ValueError):
    """Something that cannot be read or written; the message names it and what to do."""
