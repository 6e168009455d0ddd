"""Parameters at rest between forward and backward, on a few ranks instead of all.

[Note: blocks]
With ``reshard_after_forward=k`` the ranks of the shard axis form blocks of ``k`` consecutive ones,
and between forward and backward each block holds the parameters once. What a rank keeps is a slice
of the unsharded buffer itself, padding included: one contiguous copy, and in backward one transfer
of one piece straight back, whatever the parameters look like. The optimizer never sees it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from polyshard.memory.buffers import Buffer
from polyshard.transport.base import Extents, GatherPiece, Pending, Transport


class Block:
    """One rank's slice of a group's unsharded buffer. See [Note: blocks]."""

    def __init__(self, held: Buffer, unsharded: Tensor, transport: Transport, tag: int) -> None:
        """Bind the transfer; both buffers must be acquired.

        Args:
            held: ``[numel / k]``, where the slice rests.
            unsharded: the whole unsharded buffer, ``[numel]``.
            transport: among the ranks of the block.
            tag: of the group.
        """
        size = transport.size
        numel = unsharded.numel() // size
        self._held = held
        self._slice = unsharded.view(size, numel)[transport.rank]
        piece = GatherPiece(
            held.tensor, unsharded.view(size, numel), Extents(numel, (numel,) * size)
        )
        self._route = transport.gather_route([piece], tag)
        self.sent_bytes = self._route.sent_bytes
        self.received_bytes = self._route.received_bytes
        held.release()
        self.holds = False

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the slice out, before the unsharded buffer is released."""
        self._held.acquire()
        self._held.tensor.copy_(self._slice)
        self.holds = True

    def start(self, fetch: Callable[[], None]) -> Pending:
        """Begin to gather the unsharded buffer from the block; no shard is read."""
        del fetch
        return self._route.start()

    def finish(self) -> None:
        """The parameters are complete: the slice has done its work."""
        self.drop()

    def drop(self) -> None:
        """Give the slice up."""
        self._held.release()
        self.holds = False
