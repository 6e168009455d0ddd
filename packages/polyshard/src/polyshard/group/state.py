"""Which form of its parameters a group holds."""

from __future__ import annotations

from enum import Enum, auto


class State(Enum):
    """Which form of its parameters a group holds."""

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()
