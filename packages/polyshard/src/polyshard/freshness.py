"""Whether a shard still holds what was encoded from it.

[Note: kept payloads]
A codec that keeps its payload is asked to encode only when the shard changed. Version counters see
every write through a parameter, an optimizer's above all, but none through ``.data`` (swapping
averaged weights in and out is often written so). Nothing writes shards between a forward and its
backward, so there the counters are enough; at the start of a forward the values are looked at too.
On the CPU that is a sum, a fifth of what encoding costs; an accelerator would have to be waited
for, so there every forward encodes anew. A shard that rests elsewhere and is not near cannot be
looked at: a forward has it fetched, a backward does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polyshard._torch_private import in_backward


class Freshness:
    """Remembers what one shard held. See [Note: kept payloads]."""

    def __init__(self, shard: Tensor, versions: Callable[[], Sequence[int]]) -> None:
        """Watch ``shard`` (``[shard_numel]``), whose writes ``versions`` counts."""
        self._shard = shard
        self._versions = versions
        self._seen: Sequence[int] | None = None
        self._sum: int | None = None

    def is_current(self, *, is_near: bool) -> bool:
        """Whether the shard is surely as it was at the last :meth:`note`.

        Args:
            is_near: whether the shard can be looked at.
        """
        if self._seen is None or self._versions() != self._seen:
            return False
        if in_backward():
            return True
        return is_near and self._sum is not None and self._sum == self._checksum()

    def note(self) -> None:
        """What the shard holds now was encoded."""
        self._seen = self._versions()
        self._sum = self._checksum()

    def forget(self) -> None:
        """Encode at the next occasion, whatever the shard holds."""
        self._seen = None

    def _checksum(self) -> int | None:
        if self._shard.device.type != "cpu":
            return None
        # The sum of all words, which wraps around: any single change shows.
        return int(self._shard.view(torch.int64).sum().item())
