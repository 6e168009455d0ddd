"""What can be wrong with a request for a plan."""

from polyshard.errors import PolyshardError


class PlanError(PolyshardError, ValueError):
    """Something that cannot be planned; the message names it and the nearest thing that works."""
