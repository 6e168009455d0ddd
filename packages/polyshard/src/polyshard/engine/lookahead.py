"""Tells storages which shards will be gathered soon, from the order of the step before.

[Note: lookahead]
A gather reads a shard on the device; a storage elsewhere needs time to bring it there. Units run in
the same order step after step, so the order noted last time says what comes next: in forward the
units behind the one that starts, in backward those before the one whose gather was just started. A
wrong guess costs the transfer, never a value: what nobody gathered is dropped when the forward or
backward ends, since shards may change then (see [Note: turns] of the freshness).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from polyshard.exchange.gather import CodecGather

if TYPE_CHECKING:
    from polyshard.engine.unit import Unit
    from polyshard.group.group import ParameterGroup


class Lookahead:
    """See [Note: lookahead]. Does nothing unless a storage asks for it."""

    def __init__(self) -> None:
        """Nothing is known before the first step has ended."""
        self._order: list[Unit] = []
        self._units = 0

    def learn(self, order: Sequence[Unit]) -> None:
        """Remember the order of the forwards of a step that has ended."""
        if self._order != order:
            self._order = list(order)
            self._units = max((_wanted(unit) for unit in order), default=0)

    def forget(self) -> None:
        """A turn has ended: what was brought near and not gathered may be out of date soon."""
        if self._units:
            for unit in self._order:
                for group in unit.groups:
                    group.shards.forget_prefetched()

    def forward(self, index: int) -> None:
        """The unit that will be noted as number ``index``, or one around it, starts its forward."""
        if self._units:
            self._prefetch(self._order[index : index + self._units + 1])

    def backward(self, unit: Unit | None) -> None:
        """``unit`` is being gathered for the backward that comes next."""
        if self._units and unit is not None and unit.order:
            index = min(unit.order[-1], len(self._order))
            self._prefetch(reversed(self._order[max(index - self._units, 0) : index]))

    @staticmethod
    def _prefetch(units: Iterable[Unit]) -> None:
        for unit in units:
            for group in unit.groups:
                if group.state.name == "SHARDED" and _is_read(group):
                    group.shards.prefetch()


def _is_read(group: ParameterGroup) -> bool:
    """Whether a gather now would read the shard."""
    runtime = group.prepare()
    if runtime.block is not None and runtime.block.holds:
        return False
    return not (isinstance(runtime.path, CodecGather) and runtime.path.resends())


def _wanted(unit: Unit) -> int:
    """How many units ahead the storages of ``unit`` want to know."""
    storages = (group.shards.storage for group in unit.groups)
    return max((s.prefetch_units for s in storages), default=0)
