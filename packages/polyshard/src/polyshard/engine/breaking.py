"""Exceptions in a backward are noticed, although autograd calls nothing for them.

[Note: broken backwards]
Autograd calls nothing when an exception ends a backward. But it keeps what is to be called when
the backward ends well, and lets go of it when the backward is over either way. So a guard is kept
there: if it goes without having been called, an exception passed. Which one is not known at that
moment: it is on its way through C++, to the Python frame that called autograd. On a device another
thread runs backwards, which may let go of the guard later than the user resets the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

Broke = Callable[[Exception | None, FrameType | None], None]


class BackwardGuard:
    """Has ``end`` called when a backward ends well, and ``broke`` when not."""

    def __init__(self, end: Callable[[], None], broke: Broke) -> None:
        """To be queued as a callback, and kept nowhere else.

        ``broke`` is told the exception, if it is known.
        """
        self._end = end
        self._broke = broke
        self._is_over = False

    def __call__(self) -> None:
        """The backward ended well, as far as the model is concerned."""
        self._is_over = True
        try:
            self._end()
        except Exception as error:
            self._broke(error, None)
            raise

    def give_up(self) -> None:
        """The model is reset: if the backward is not over, an exception has passed."""
        if not self._is_over:
            self._is_over = True
            self._broke(None, None)

    def __del__(self) -> None:
        """See [Note: broken backwards]."""
        if not (self._is_over or sys.is_finalizing()):
            self._broke(None, sys._getframe().f_back)
