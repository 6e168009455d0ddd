"""Whether a shard still holds what was made of it: unsharded parameters, a payload, a copy nearby.

[Note: turns]
Shards are written in ways nothing counts: foreach and fused optimizers, ``torch._foreach_*`` on an
averaged teacher and writes through ``.data`` leave the version counters of a ``DTensor`` as they
are. So counters decide nothing here; values do, and *when* they are looked at is the rule. A
*turn* is an outermost forward, or a backward. Within one, shards hold still: a model that changes
its weights while it computes with them means neither the old ones nor the new. Between turns
anybody may have written anything. What was made of a shard in a turn is therefore good for that
turn, and for the backward of the forwards it was made in; in another turn it is used only after a
look at the values, and in none (``unshard()`` called by hand) after a look every time.

In a plain training loop nothing outlives its turn but a codec's kept payload, so nothing else is
ever looked at. Looking costs about what reading the shard does: unsharded parameters hold this
rank's chunk themselves and are compared with it bitwise; of a payload's shard a CRC-32 is kept,
which sees any change of up to 32 neighbouring bits and of others all but one in 2^32, whatever
moved where. Version counters are read as well where that is free of charge, so that a write within
a turn that does count is not missed by what one rank decides for itself.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from polyshard.memory.streams import streams_of
from polyshard.transport.base import Turn

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_PIECE_NUMEL = 1 << 20


class Freshness:
    """Remembers what one shard held when its payload was encoded.

    [Note: kept payloads]
    The first gather of a forward looks at the shard, later ones of the turn and those of the
    backward send the payload again. An accelerator would have to be waited for, so there every
    forward encodes anew. A shard that rests elsewhere and is not near cannot be looked at: a
    forward has it fetched, a backward does not.
    """

    def __init__(self, shard: Tensor, versions: Callable[[], Sequence[int]], turn: Turn) -> None:
        """Watch ``shard`` (``[shard_numel]``); ``versions`` counts some of the writes to it."""
        self._shard = shard
        self._versions = versions
        self._turn = turn
        self._made: int | None = None
        self._seen: Sequence[int] = ()
        self._crc: int | None = None
        self._looked: tuple[int, Sequence[int]] | None = None
        self._latest: int | None = None

    def is_current(self, *, is_near: bool) -> bool:
        """Whether the shard is as it was at the last :meth:`note`, as far as turns tell.

        Args:
            is_near: whether the shard can be looked at.
        """
        if self._made is None:
            return False
        if self._turn.vouches(self._made):
            return self._versions() == self._seen
        if not (is_near and self._crc is not None and self._look() == self._crc):
            return False
        self._made, self._seen = self._turn.number, self._versions()
        return True

    def note(self) -> None:
        """What the shard holds now was encoded."""
        self._crc = self._look()
        self._made, self._seen = self._turn.number, self._versions()

    def forget(self) -> None:
        """Encode at the next occasion, whatever the shard holds."""
        self._made = None

    def _look(self) -> int | None:
        """The checksum of the values; once a turn, as long as no write is counted."""
        now = (self._turn.number, self._versions())
        if not self._turn.in_forward or self._looked != now:
            self._latest = imprint(self._shard)
            self._looked = now
        return self._latest


def imprint(values: Tensor) -> int | None:
    """A checksum of contiguous values and their order; ``None`` where that would mean waiting."""
    if values.is_meta or streams_of(values.device) is not None:
        return None
    # Not through numpy(): that makes a storage refuse to be resized for the rest of its life.
    memory = (ctypes.c_uint8 * values.nbytes).from_address(values.data_ptr())
    return zlib.crc32(memoryview(memory).cast("B"))


@torch.no_grad()
def differs(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Whether any copy (the first of a pair) is not bitwise what its original casts to.

    A 0-dim bool on their device: nothing waits for an accelerator here.
    """
    found: list[Tensor] = []
    for copy, original in pairs:
        for mine, source in zip(_pieces(copy), _pieces(original), strict=True):
            wanted = source.to(mine.dtype)
            if streams_of(mine.device) is not None:
                found.append((_bits(mine) != _bits(wanted)).any())
            elif not torch.equal(_bits(mine), _bits(wanted)):
                return torch.tensor(True, device="cpu")
    return torch.stack(found).any() if found else torch.tensor(False, device="cpu")


def _pieces(values: Tensor) -> Sequence[Tensor]:
    """In parts along the first dim, so that casting one needs little memory."""
    if values.dim() == 0 or values.numel() <= _PIECE_NUMEL:
        return (values,)
    rows = max(_PIECE_NUMEL * values.shape[0] // values.numel(), 1)
    return torch.split(values, rows)


def _bits(values: Tensor) -> Tensor:
    """As integers: unlike floats they tell zeros apart, and know a NaN again."""
    if values.dim() == 0:
        values = values.view(1)
    return values.view(_WORDS.get(values.itemsize, torch.int64))
