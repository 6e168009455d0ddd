"""Plugins let go of what they made for a group, once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from polyshard.composition.manager import Implementation
from polyshard.seams import GroupInfo


class Teardown:
    """What plugins undo of a group: when they are told to, or when nobody holds the group any more.

    An object that the group owns instead of a finalizer: those are held by the interpreter with
    all they need, so that a plugin which knows its model would keep that alive.
    """

    def __init__(
        self, implementations: Sequence[Implementation], group: GroupInfo, name: object
    ) -> None:
        """``implementations`` are in plugin order.

        ``name`` is asked what the group is called (``str(name)``) when it goes.
        """
        self.is_done = False
        self._implementations = implementations
        self._group = group
        self._name = name

    def run(self) -> None:
        """Call each plugin, the last one first; a failure keeps none of the others.

        Raises:
            Exception: the first one raised, with notes of the others.
        """
        if self.is_done:
            return
        self.is_done = True
        errors: list[Exception] = []
        for implementation in reversed(self._implementations):
            group = replace(self._group, name=str(self._name))
            try:
                implementation({"group": group})
            except Exception as error:
                error.add_note(f"while letting go of group '{group.name}'")
                errors.append(error)
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"and then: {other!r} ({'; '.join(other.__notes__)})")
            raise errors[0]

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """The group is gone. A process that ends gives everything back by itself."""
        if not is_finalizing():
            self.run()
