"""Optimizer state that no other code can have changed, so that no step has to look at it.

[Note: sealed state]
Only code that holds state can change it. While the optimizer alone holds it, and no other code has
read ``optimizer.state`` since, it is as the last step left it. So reading that attribute is noted,
and opens the *seal*; until it closes again, each step looks at all state (see [Note: does the plan
hold]). It closes when a look has found nothing changed and reference counts say that no other code
holds state any more: counts of the mapping, of each parameter's dict, of each entry, of what is
local of it, and of the storages, which aliases share. Counting takes longer than a look, so the
next attempt after one that failed waits twice as long: a state dict may be kept for good.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from polyshard._torch.optimizers import local_of
from polyshard._torch.private import storages_are_held

PLAIN_VALUES = (int, float, bool, str, type(None))
"""Of which nothing can be changed in place."""
_LONGEST_WAIT = 1024  # looks between two attempts to close a seal


class Seal:
    """Whether state of a plan is sealed. See [Note: sealed state]."""

    def __init__(self, can_close: bool = True) -> None:
        """``can_close`` is false where others than the optimizer work on the state."""
        self.is_closed = False
        self._can_close = can_close
        self._wait = self._left = 1
        self._openings = 0

    def open(self) -> None:
        """Other code was shown the state, maybe in another thread."""
        self._openings += 1
        if self.is_closed:
            self.is_closed = False
            self._wait = self._left = 1

    def try_to_close(self, holdings: Holdings) -> None:
        """State is as it was: close, if it is ours alone and it is time for another attempt."""
        self._left -= 1
        if self._left or not self._can_close:
            return
        openings = self._openings
        self.is_closed = holdings.are_ours_alone() and openings == self._openings
        self._wait = self._left = min(2 * self._wait, _LONGEST_WAIT)


class Holdings:
    """The state of some parameters, and the references to it that are known."""

    def __init__(
        self, states: dict[Any, Any], dicts: Sequence[dict[str, Any]], known: Iterable[object]
    ) -> None:
        """``dicts`` are entries of ``states``, all there are of interest.

        ``known`` yields every object once for each reference to it, those in ``states``, in
        ``dicts`` and of the caller's arguments aside: too few of them, and it is never ours alone.
        """
        self._states = states
        self._dicts = list(dicts)
        self._entries = [v for own in dicts for v in own.values() if isinstance(v, Tensor)]
        self._is_plain = all(
            isinstance(v, (Tensor, *PLAIN_VALUES)) for own in dicts for v in own.values()
        )
        counted = Counter(map(id, chain(known, self._dicts, self._entries)))
        places = Counter(map(id, self._entries))
        self._of_states = counted[id(states)] + 1  # the attribute of the optimizer
        self._of_dicts = [counted[id(own)] + 1 for own in self._dicts]
        self._of_entries = [counted[id(v)] + places[id(v)] for v in self._entries]

    def are_ours_alone(self) -> bool:
        """Whether no other code can reach them."""
        return (
            self._is_plain
            and _references([self._states]) == [self._of_states + 2]  # this object and the list
            and _references(self._dicts) == self._of_dicts
            and _references(self._entries) == self._of_entries
            and not any(map(weakref.getweakrefcount, self._entries))
            and self._locals_are_ours()
        )

    def _locals_are_ours(self) -> bool:
        locals_ = [local_of(value) for value in self._entries if local_of(value) is not value]
        # each is in the list, and in the window that it belongs to
        if any(count != 2 for count in _references(locals_)):
            return False
        if any(map(weakref.getweakrefcount, locals_)):
            return False
        del locals_
        storages = [local_of(value).untyped_storage() for value in self._entries]
        if any(s.device.type == "cpu" and s.is_shared() for s in storages):
            return False  # other processes have it in hand
        nobodys = torch.empty(
            1, device="cpu"
        )  # torch itself may hold what stands for a storage, or not
        (usual,) = _references([nobodys.untyped_storage()])
        if any(count != usual for count in _references(storages)):
            return False
        return not storages_are_held(storages)


def _references(values: Sequence[object]) -> list[int]:
    """How many references each has, without those of looking."""
    looking = next(map(sys.getrefcount, [object()])) - 1
    return [count - looking for count in map(sys.getrefcount, values)]
