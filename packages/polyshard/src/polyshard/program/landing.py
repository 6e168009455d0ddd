"""Gradients that land whole on one rank, instead of in rows on all.

[Note: owners]
All chunks of such a gradient go to its owner on the shard axis, where they are added in rank order;
sums of replicas then go to one of them. What landed is the owner's ``.grad``, and that of every
other rank is empty: a ``DTensor`` whose rows all lie with one rank (see [Note: whole rows]). Rows
that are not asked for cost nothing; the update returns by rows when the optimizer sends it.

Ranks learn of each other's gradients before they send any, so that there is nothing to take back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from polyshard.errors import UnsupportedError
from polyshard.memory.buffers import Recycled
from polyshard.memory.pages import PagePool
from polyshard.program.accumulation import Accumulation
from polyshard.program.ops import Traffic
from polyshard.program.owned import Owned
from polyshard.transport.base import DONE, Pending


class Placing:
    """The dtype of each parameter's sharded gradient; ``None`` is that of the reduction."""

    def __init__(
        self, dtypes: Sequence[torch.dtype | None], orig: torch.dtype, sums: torch.dtype
    ) -> None:
        """``orig`` is the original dtype of the group, ``sums`` that of the reduction."""
        self._dtypes, self.sums = tuple(dtypes), sums
        self._kinds = tuple(dict.fromkeys(self._dtypes))
        self.is_plain = self._kinds == (orig,)
        self.is_single = len(self._kinds) == 1
        """Whether all gradients have one dtype."""

    def keeps(self, dtype: torch.dtype) -> bool:
        """Whether :meth:`cast` leaves a sum of ``dtype`` as it is."""
        return not self.is_single or (self._kinds[0] or dtype) == dtype

    def dtype_of(self, index: int) -> torch.dtype | None:
        """Of one parameter's gradient."""
        return self._dtypes[index]

    def cast(self, total: Tensor) -> Tensor:
        """``total`` (``[shard_numel]``) in the dtype of all gradients, if they have one."""
        return total.to(self._kinds[0] or total.dtype) if len(self._kinds) == 1 else total

    def parts(
        self, total: Tensor, present: Sequence[int]
    ) -> Iterator[tuple[Tensor, Sequence[int]]]:
        """What :meth:`cast` made of a sum, in each dtype, with the parameters that have it."""
        if len(self._kinds) == 1:
            yield total, present
            return
        for dtype in self._kinds:
            indices = [i for i in present if self._dtypes[i] is dtype]
            if indices:
                yield total.to(dtype or total.dtype), indices

    def __str__(self) -> str:
        """The dtypes that differ, for people."""
        return ", ".join("any" if d is None else str(d).removeprefix("torch.") for d in self._kinds)


Arriving = dict[int, tuple[Tensor | None, Pending]]
"""Whole gradients on their way, by parameter index: where this rank gets one, and the transfer."""


class Landing:
    """Those of one group. See [Note: owners]."""

    def __init__(
        self,
        owned: dict[int, Owned],
        waiting: Accumulation,
        placing: Placing,
        pool: PagePool | None,
        tells: Callable[[Owned], None],
    ) -> None:
        """Of the parameters that have an owner, by index.

        ``tells`` is called with each whose gradient is in place after the last backward.
        """
        self.owned, self._tells = owned, tells
        self._waiting, self._placing, self._dtype = waiting, placing, placing.sums
        self._memory = {i: Recycled(pool) for i in self.owned}

    def start(self, sources: dict[int, Tensor]) -> Arriving:
        """Send gradients to their owners."""
        arriving: Arriving = {}
        for index, source in sources.items():
            owned = self.owned[index]
            flat, out = source.view(-1), None
            if owned.sums_shards():
                out = self._memory[index].take(flat.numel(), self._dtype, flat.device)
            pending = owned.reduce(flat, out) if flat.numel() else DONE
            arriving[index] = (out, pending)
        return arriving

    def traffic(self, present: Collection[int], wire: torch.dtype) -> Traffic:
        """Bytes that leave and reach this rank with gradients of these parameters."""
        sent = received = 0
        for owned in (o for i, o in self.owned.items() if i in present):
            if owned.sums_shards():
                received += owned.arriving_numel
            else:
                sent += owned.numel
        return Traffic(sent * wire.itemsize, received * wire.itemsize)

    def finish(self, arriving: Arriving, divisor: float, *, sums_replicas: bool) -> list[Owned]:
        """Wait, and put what landed in place; the parameters that got a gradient."""
        found: dict[int, Tensor | None] = {}
        for index, (out, pending) in arriving.items():
            pending.wait()
            found[index] = out
        arriving.clear()
        partial = self._waiting.owned
        for index in sorted({*partial, *found}):
            earlier, total = partial.pop(index, None), found.pop(index, None)
            if earlier is not None:
                total = earlier if total is None else total.add_(earlier)
            found[index] = total
        if not sums_replicas:
            partial.update({i: None if t is None else t.clone() for i, t in found.items()})
            return []
        return [self._put(self.owned[i], total, divisor) for i, total in found.items()]

    def _put(self, owned: Owned, total: Tensor | None, divisor: float) -> Owned:
        dtype = self._placing.dtype_of(owned.index) or self._dtype
        whole = owned.over_replicas(total)
        if whole is not None:
            if divisor != 1.0:
                whole.div_(divisor)
            whole = whole.to(dtype)
        owned.put(whole, dtype)
        return owned

    def tell(self, placed: Iterable[Owned], *, is_last: bool) -> None:
        """Tell the plugin what was put in place, unless more follows."""
        for owned in placed if is_last else ():
            self._tells(owned)


def check_hook(hook: object) -> None:
    """Refuse a hook on sums of shards where some gradients are none.

    Raises:
        UnsupportedError: saying so.
    """
    if hook is not None:
        raise UnsupportedError(
            "set_all_reduce_hook() changes the reduced shard of a group, and some gradients of "
            "this one land whole on an owner instead. Leave its matrices out of that plugin, or do "
            "without the hook."
        )
