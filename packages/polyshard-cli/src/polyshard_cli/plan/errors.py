"""What can be wrong with a request for a plan."""

import difflib
from collections.abc import Iterable

from polyshard.errors import PolyshardError


class PlanError(PolyshardError, ValueError):
    """Something that cannot be planned; the message names it and the nearest thing that works.

    Whatever reads or applies a request raises it, in every room of this package.
    """


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The one of ``known`` that is most like ``name``; empty where none is like it at all."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, cutoff)), "")
