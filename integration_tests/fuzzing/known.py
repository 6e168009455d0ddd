"""Cases that fail for a reason that is known and not repaired yet; empty is what it should be."""

from __future__ import annotations

from collections.abc import Callable

from fuzzing.case import Case

KNOWN: tuple[tuple[str, Callable[[Case], bool]], ...] = ()
"""Reason, and which cases it is about."""


def known(case: Case) -> str | None:
    """Why ``case`` is left out, if it is."""
    return next((reason for reason, concerns in KNOWN if concerns(case)), None)
