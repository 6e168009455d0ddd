"""The gradient side of a group: from what autograd wrote to sharded gradients.

[Note: reduction]
A direct gradient is sent from the memory autograd wrote it to; staged ones are packed first. What
arrives is summed per shard and averaged once. The wire dtype must be the same on all ranks even if
they accumulated differently, so it follows from settings alone: the reduce dtype after backwards
without synchronisation, else the parameter dtype. Sums are in the reduce dtype. fp16 sums are
divided in two steps around the sum, so that neither overflows (as DDP and FSDP do).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from polyshard._torch_private import local_tensor
from polyshard.averaging import Averaging
from polyshard.buffers import Buffer, Recycled, new_buffer
from polyshard.fit import wordless
from polyshard.gather import Line
from polyshard.held import HeldGradients, Slot, part_of
from polyshard.layout import ParameterLayout
from polyshard.mesh import MeshRoles
from polyshard.pages import PagePool
from polyshard.pieces import chunk_pairs, extents_of
from polyshard.seams import BoundReduceCodec
from polyshard.shards import Shards
from polyshard.transport.base import Pending, ReduceRoute

ReduceHook = Callable[[Tensor], None]


@dataclass
class ReduceSettings:
    """What a user may change about a group's reduction between steps."""

    divide_factor: float | None = None
    reduce_unused: bool = False
    all_reduce: bool = True
    hook: ReduceHook | None = None
    """Called with the averaged shard (``[shard_numel]``, reduce dtype) to change it in place."""


@dataclass
class InFlight:
    """A reduction under way: what to wait for, and what to make of the result.

    ``sources`` keeps the gradients alive until they were sent.
    """

    pending: Pending
    total: Tensor
    present: list[int]
    averaging: Averaging
    sources: Sequence[Tensor | None] = field(repr=False)
    scratch: Buffer | None = None
    """Where staged gradients were packed; free once the transfer has ended."""
    is_last: bool = True
    """Whether no backward of this iteration follows."""


class Reducer:
    """Reduces the gradients of one group. See [Note: reduction]."""

    def __init__(
        self,
        shards: Shards,
        dtype: torch.dtype,
        roles: MeshRoles,
        line: Line,
        codec: BoundReduceCodec | None,
        check_placed: Callable[[Tensor, object], None],
        pool: PagePool | None = None,
    ) -> None:
        """Bind routes; ``dtype`` is the reduce dtype.

        ``check_placed`` looks at what the storage makes of the first gradient.
        """
        self._check_placed: Callable[[Tensor, object], None] | None = check_placed
        self._pool = pool
        self._scratch: Buffer | None = None
        self._shards = shards
        self._layout = shards.layout
        self._dtype = dtype
        self._roles = roles
        self._transport = line.transport
        self._codec = codec
        self._route: ReduceRoute = line.reduce_route(extents_of(self._layout), dtype)
        self._partial: Tensor | None = None
        self._held = HeldGradients()
        self._totals = Recycled()
        staged = [self._layout.parameters[i] for i in self._layout.staged]
        self._fills_rows = all(p.is_even for p in staged) and (
            sum(p.chunk_numel for p in staged) == self._layout.staged_numel
        )
        # What local_view() would work out for every gradient of every step.
        rank = roles.shard_rank
        self._slots: list[Slot] = [
            (shape, torch.empty(shape, device="meta").stride(), placed.shard_offset)
            for placed in self._layout.parameters
            for shape in (placed.local_shape(rank),)
        ]
        self.settings = ReduceSettings()

    @property
    def payload_bytes(self) -> tuple[int | None, int | None]:
        """Bytes the codec sends to each peer, and to each replica; ``None`` without one."""
        replicas = getattr(self._codec, "replicas", None)
        return (
            None if self._codec is None else self._codec.payload_bytes,
            None if replicas is None else replicas.payload_bytes,
        )

    def rebind(self, codec: BoundReduceCodec | None) -> None:
        """Go on with another codec; nothing is in flight."""
        self._codec = codec
        self._scratch = None

    def start(self, gradients: dict[int, Tensor], wire_dtype: torch.dtype) -> tuple[InFlight, int]:
        """Begin to reduce; ``gradients`` maps parameter indices to unsharded gradients.

        Returns:
            The reduction in flight, and the bytes that leave this rank.
        """
        divisor = self.settings.divide_factor or float(self._roles.data_parallel_size)
        averaging = Averaging.of(divisor, self._dtype)
        sources = {i: self._source(g, wire_dtype, averaging) for i, g in gradients.items()}
        total = self._totals.take(
            self._layout.shard_numel, self._dtype, self._first_device(sources)
        )
        scratch: Buffer | None = None
        if self._codec is not None:
            pending, keep, sent = self._start_codec(self._codec, sources, total)
        else:
            keep, scratch = self._packed_pieces(sources, wire_dtype)
            outs = self._piece_outs(total)
            pending = self._route.start(keep, outs)
            sent = self._route.sent_bytes(keep)
        return InFlight(pending, total, sorted(gradients), averaging, keep, scratch), sent

    @staticmethod
    def _first_device(sources: dict[int, Tensor]) -> torch.device:
        return next(iter(sources.values())).device

    @staticmethod
    def _source(gradient: Tensor, dtype: torch.dtype, averaging: Averaging) -> Tensor:
        source = gradient if gradient.dtype == dtype else gradient.to(dtype)
        if not source.is_contiguous():
            source = source.contiguous()
        return source if averaging.before == 1.0 else source.div_(averaging.before)

    def _packed_pieces(
        self, sources: dict[int, Tensor], dtype: torch.dtype
    ) -> tuple[list[Tensor | None], Buffer | None]:
        """What goes on the wire: direct gradients as they are, staged ones packed in a buffer."""
        layout = self._layout
        staged = {i: sources[i] for i in layout.staged if i in sources}
        scratch: Buffer | None = None
        packed: Tensor | None = None
        if staged:
            nbytes = layout.world_size * layout.staged_numel * dtype.itemsize
            scratch = self._take_scratch(nbytes, next(iter(staged.values())).device)
            packed = scratch.tensor.view(dtype)
            self._pack(staged, packed.view(layout.world_size, layout.staged_numel))
        return self._pieces(sources, packed), scratch

    def _pieces(self, sources: dict[int, Tensor], packed: Tensor | None) -> list[Tensor | None]:
        layout = self._layout
        direct = [sources[i].view(-1) if i in sources else None for i in layout.direct]
        return [*direct, packed] if layout.staged else direct

    def _pack(self, staged: dict[int, Tensor], packed: Tensor) -> None:
        """Copy gradients into ``packed`` (``[W, staged_numel]``); what nobody fills is zero."""
        layout = self._layout
        if not (self._fills_rows and len(staged) == len(layout.staged)):
            packed.zero_()
        targets: list[Tensor] = []
        parts: list[Tensor] = []
        for index, source in staged.items():
            placed = layout.parameters[index]
            start = placed.shard_offset - layout.staged_offset
            rows = packed[:, start : start + placed.chunk_numel]
            for part, target in chunk_pairs(source, rows, placed):
                parts.append(part)
                targets.append(target)
        if targets:
            torch._foreach_copy_(targets, parts)

    def _piece_outs(self, total: Tensor) -> list[Tensor]:
        layout = self._layout
        outs = [
            total[p.shard_offset : p.shard_offset + p.chunk_numel]
            for p in (layout.parameters[i] for i in layout.direct)
        ]
        if layout.staged:
            outs.append(total[layout.staged_offset :])
        return outs

    def _start_codec(
        self, codec: BoundReduceCodec, sources: dict[int, Tensor], total: Tensor
    ) -> tuple[Pending, list[Tensor | None], int]:
        layout = self._layout
        world = layout.world_size
        chunks = [
            self._chunk_rows(sources.get(index), placed, total)
            for index, placed in enumerate(layout.parameters)
        ]
        scratch = self._take_scratch(2 * world * codec.payload_bytes, total.device)
        payloads, received = scratch.tensor.view(2, world, codec.payload_bytes)
        wordless(cast("Any", codec).encode(chunks, payloads), codec, "encode")
        pending = self._transport.exchange(payloads, received)
        outs = [total[p.shard_offset : p.shard_offset + p.chunk_numel] for p in layout.parameters]
        keep: list[Tensor | None] = [payloads]
        sent = (world - 1) * codec.payload_bytes
        return _Decoding(pending, codec, received, outs, scratch, self._give_back), keep, sent

    def _take_scratch(self, nbytes: int, device: torch.device) -> Buffer:
        """Bytes for payloads or packed gradients, on pages that unsharded buffers gave up."""
        scratch, self._scratch = self._scratch, None  # a second reduction in flight makes its own
        if scratch is None or scratch.nbytes != nbytes:
            scratch = new_buffer(nbytes, torch.uint8, device, self._pool)
        scratch.acquire()
        return scratch

    def _give_back(self, scratch: Buffer) -> None:
        scratch.release()
        self._scratch = scratch

    @staticmethod
    def _chunk_rows(source: Tensor | None, placed: ParameterLayout, total: Tensor) -> Tensor:
        """``[W, chunk_numel]`` of one gradient: its own memory where that is laid out so."""
        shape = (placed.world_size, placed.chunk_numel)
        if source is None:
            return total.new_zeros(1, 1).expand(shape)
        if placed.dim == 0 and placed.is_even and source.dtype == total.dtype:
            return source.view(shape)
        rows = total.new_zeros(shape)
        for part, target in chunk_pairs(source, rows, placed):
            target.copy_(part)
        return rows

    def predicted_bytes(self, gradients: dict[int, Tensor], wire_dtype: torch.dtype) -> int:
        """Bytes :meth:`start` would send for gradients of these shapes (meta tensors will do)."""
        world = self._layout.world_size
        if not gradients:
            return 0
        if self._codec is not None:
            return (world - 1) * self._codec.payload_bytes
        sources = {i: g.to(wire_dtype) for i, g in gradients.items()}
        packed: Tensor | None = None
        if any(i in sources for i in self._layout.staged):
            numel = world * self._layout.staged_numel
            packed = torch.empty(numel, dtype=wire_dtype, device="meta")
        return self._route.sent_bytes(self._pieces(sources, packed))

    def finish(self, flight: InFlight) -> Tensor | None:
        """Wait, reduce over replicas, average, cast, and move to where gradients rest.

        Returns:
            The sharded gradients of the whole group (``[shard_numel]``, original dtype), or
            ``None`` while replicas accumulate without all-reduce, and while a storage that asks
            for it has them added up on the device (see [Note: held gradients] in held.py).
        """
        flight.pending.wait()
        if flight.scratch is not None:
            self._give_back(flight.scratch)
        total = flight.total
        if self._roles.is_replicated:
            if self._partial is not None:
                total.add_(self._partial)
                self._partial = None
            if not self.settings.all_reduce:
                self._partial = total
                return None
            self._sum_replicas(total)
        if flight.averaging.after != 1.0:
            total.div_(flight.averaging.after)
        if self.settings.hook is not None:
            self.settings.hook(total)
        total = total.to(self._shards.dtype)
        storage = self._shards.storage
        if self._held or (not flight.is_last and getattr(storage, "holds_gradients", False)):
            self._held.add(total, {i: self._slots[i] for i in flight.present})
            if not flight.is_last:
                return None
            total, flight.present = self._held.take()
        return self._place(total)

    def _place(self, gradient: Tensor) -> Tensor:
        """Next to the resting shard; the storage's first answer is looked at."""
        placed = self._shards.storage.place_gradient(gradient)
        if self._check_placed is not None:
            self._check_placed(gradient, placed)
            self._check_placed = None
        return placed

    def place_held(self) -> None:
        """Put in place what was held and no reduction of the last backward took along."""
        if self._held:
            total, present = self._held.take()
            self.store(self._place(total), present)

    def _sum_replicas(self, total: Tensor) -> None:
        groups = self._roles.replicate_groups
        codec = getattr(self._codec, "replicas", None)
        if codec is None or len(groups) != 1:
            for group in groups:
                dist.all_reduce(total, group=group)
            return
        payload = total.new_empty(codec.payload_bytes, dtype=torch.uint8)
        payloads = payload.new_empty(self._roles.replicate_size, codec.payload_bytes)
        wordless(codec.encode(total, payload), codec, "encode")
        dist.all_gather(list(payloads.unbind()), payload, group=groups[0])
        wordless(codec.decode_sum(payloads, total), codec, "decode_sum")

    def discard(self) -> None:
        """Forget partial sums of a step that failed."""
        self._partial = None
        self._held = HeldGradients()

    def store(self, total: Tensor, present: Sequence[int]) -> None:
        """Set or add to ``.grad`` of the sharded parameters, then run their hooks."""
        accumulate_into: list[Tensor] = []
        accumulate_from: list[Tensor] = []
        for index in present:
            sharded = self._shards.parameters[index]
            value = part_of(total, self._slots[index])
            if sharded.parameter.grad is None:
                sharded.parameter.grad = sharded.wrap(value)
            else:
                accumulate_into.append(local_tensor(cast("DTensor", sharded.parameter.grad)))
                accumulate_from.append(value)
        if accumulate_into:
            torch._foreach_add_(accumulate_into, accumulate_from)
            self._totals.drop()  # gradients live elsewhere: this would be a second copy of them
        else:
            self._totals.keep_only_if_used_by(total)
        for index in present:
            parameter = self._shards.parameters[index].parameter
            hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
            for hook in tuple(hooks.values()) if hooks else ():
                hook(parameter)


@dataclass
class _Decoding:
    """An exchange of payloads whose sum is decoded when they have arrived."""

    pending: Pending
    codec: Any
    received: Tensor
    outs: list[Tensor]
    scratch: Buffer
    give_back: Callable[[Buffer], None]

    def wait(self) -> None:
        self.pending.wait()
        wordless(self.codec.decode_sum(self.received, self.outs), self.codec, "decode_sum")
        self.give_back(self.scratch)
