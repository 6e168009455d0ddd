"""Where a rank is: at which group, in which forward or backward."""

from __future__ import annotations

import weakref
from typing import Protocol

from typing_extensions import override

from polyshard.exchange.freshness import Turn


class Working(Protocol):
    """A group, as far as it says where its rank is."""

    turn: Turn

    @property
    def name(self) -> str:
        """What it is called."""
        ...


class Place:
    """Put in words when somebody asks, with ``str()``."""

    def __init__(self, group: Working) -> None:
        """``group`` may be renamed, and get another turn; it is not kept alive."""
        self._group = weakref.ref(group)

    @override
    def __str__(self) -> str:
        group = self._group()
        if group is None:
            return "a group that is gone"
        turn = group.turn
        number = f"forward {turn.count}"
        if turn.in_backward:
            number = f"the backward of {number}"
        elif not turn.in_forward:
            number = f"no forward, after {number}"
        return f"group '{group.name}' in {number}"
