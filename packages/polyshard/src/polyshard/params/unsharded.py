"""The unsharded side of a group: one buffer of regions, and the leaves over it.

Reads [Note: layout] and [Note: stable storage].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyshard.memory.buffers import Buffer, FixedBuffer, new_buffer
from polyshard.memory.pages import PagePool
from polyshard.params.parameter import note_origin
from polyshard.params.sharded import Shards
from polyshard.plugins.transforms import TransformStack
from polyshard.sharding.layout import block_padded


class Unsharded:
    """The unsharded buffer of a group and the leaves registered while it is filled."""

    def __init__(
        self,
        shards: Shards,
        dtype: torch.dtype,
        device: torch.device,
        pool: PagePool | None,
        transforms: TransformStack,
        block_size: int | None = None,
        *,
        is_decoded: bool = False,
    ) -> None:
        """Make the buffer and the leaves; it stays acquired until the paths have taken views.

        ``is_decoded`` says that a codec writes the buffer: then it is never the shard itself.
        """
        self._block_size = block_size
        self._transforms = transforms
        self._is_decoded = is_decoded
        self.layout = shards.layout
        self._shards = shards
        self._pool = pool
        self._device = device
        self.dtype = dtype
        self.buffer = self._new_buffer()
        self.buffer.acquire()
        self.leaves = [self._leaf(i) for i in range(len(self.layout.parameters))]

    def _computes_with_shard(self) -> bool:
        """A world of one computes with the shard itself: chunks and regions coincide.

        A plugin whose storage fills another tensor may rest the shard where computing is slow.
        """
        shard = self._shards.buffer
        rests_here = shard.dtype == self.dtype and self.shard_view() is shard
        return self.layout.world_size == 1 and rests_here and not self._is_decoded

    def _new_buffer(self) -> Buffer:
        layout = self.layout
        if self._computes_with_shard():
            return FixedBuffer(self._shards.buffer)
        numel = block_padded(layout.unsharded_numel, self._block_size)
        return new_buffer(numel, self.dtype, self._device, self._pool)

    def serves(
        self,
        dtype: torch.dtype,
        pool: PagePool | None,
        block_size: int | None,
        *,
        is_decoded: bool,
    ) -> bool:
        """Whether memory and leaves suit parameters that were replaced or moved meanwhile.

        Leaves that stay keep the gradients accumulated in them, and a graph that waits for its
        backward keeps its leaves.
        """
        was_shard = isinstance(self.buffer, FixedBuffer)
        same = dtype == self.dtype and is_decoded == self._is_decoded and pool is self._pool
        return (
            same
            and self._is_padded_for(block_size)
            and was_shard == self._computes_with_shard()
            and not (was_shard and self._transforms)
        )

    def _is_padded_for(self, block_size: int | None) -> bool:
        """Whether the ranks of a block could each keep an equal part of the memory."""
        numel = block_padded(self.layout.unsharded_numel, block_size)
        return block_size is None or numel == self.buffer.tensor.numel()

    def follow(self) -> None:
        """Use the shards as they are now."""
        if isinstance(self.buffer, FixedBuffer):
            self.buffer = FixedBuffer(self._shards.buffer)
            for index, leaf in enumerate(self.leaves):
                leaf.data = self._view(index)
        self.buffer.acquire()
        for leaf, sharded in zip(self.leaves, self._shards.parameters, strict=True):
            leaf.__dict__.update(sharded.parameter.__dict__)
            note_origin(leaf, sharded)

    def _leaf(self, index: int) -> nn.Parameter:
        sharded = self._shards.parameters[index].parameter
        view = self._view(index)
        if self._transforms:
            view = self._unflattened(view, index)
        leaf = nn.Parameter(view, requires_grad=sharded.requires_grad)
        leaf.__dict__.update(sharded.__dict__)
        note_origin(leaf, self._shards.parameters[index])
        return leaf

    def _view(self, index: int) -> Tensor:
        placed = self.layout.parameters[index]
        view = torch.empty(0, dtype=self.dtype, device=self._device)
        stride = torch.empty(placed.shape, device="meta").stride()
        storage = self.buffer.tensor.untyped_storage()
        offset = self.buffer.tensor.storage_offset() + placed.region_offset
        view.set_(storage, offset, placed.shape, stride)
        return view

    def _unflattened(self, view: Tensor, index: int) -> Tensor:
        parameter = self._shards.parameters[index]
        with torch.no_grad():  # the dtype is that of compute now, and a cast may have become a copy
            return self._transforms.unflatten(view, parameter.extensions, parameter.info)

    def region(self, index: int) -> Tensor:
        """``[W, chunk_numel]`` of a direct parameter."""
        placed = self.layout.parameters[index]
        flat = self.buffer.tensor[placed.region_offset : placed.region_offset + placed.region_numel]
        return flat.view(placed.world_size, placed.chunk_numel)

    def home(self, index: int) -> Tensor:
        """A staged parameter itself, in its shape."""
        placed = self.layout.parameters[index]
        flat = self.buffer.tensor[placed.region_offset : placed.region_offset + placed.numel]
        return flat.view(placed.shape)

    def shard_view(self) -> Tensor:
        """The shard on the compute device, as transfers read it (``[shard_numel]``)."""
        return self._shards.storage.view()

    @property
    def rests_near(self) -> bool:
        """Whether :meth:`shard_view` is what rests, so that it holds the shard at any time."""
        return self.shard_view() is self._shards.buffer and not self._shards.has_strays

    def versions(self) -> list[int]:
        """See :meth:`polyshard.params.sharded.Shards.versions`."""
        return self._shards.versions()

    def scratch(self, numel: int, dtype: torch.dtype | None = None) -> Buffer:
        """An acquired buffer beside the parameters, from the same pool.

        Of their dtype it is the engine's alone; of another one (bytes) plugins see it.
        """
        wanted, is_shown = dtype or self.dtype, dtype is not None
        buffer = new_buffer(numel, wanted, self._device, self._pool, is_shown=is_shown)
        buffer.acquire()
        return buffer
