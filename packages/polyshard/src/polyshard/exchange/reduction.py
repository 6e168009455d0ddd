"""The gradient side of a group: from what autograd wrote to sharded gradients.

[Note: reduction]
A direct gradient is sent from the memory autograd wrote it to; staged ones are packed first. What
arrives is summed per shard and averaged once. The wire dtype must be the same on all ranks even if
they accumulated differently, so it follows from settings alone: the reduce dtype after backwards
without synchronisation, else the parameter dtype. Sums are in the reduce dtype. fp16 sums are
divided in two steps around the sum, so that neither overflows (as DDP and FSDP do).

The sum of a whole shard has parts that no gradient fills: parameters without one, and padding.
Where somebody sees all of it (a hook, replicas, a storage) they are zero; else they are undefined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from polyshard._torch.private import local_tensor
from polyshard._torch.record_stream import owns_memory
from polyshard.errors import GradientMismatchError, UnsupportedError
from polyshard.exchange.accumulation import Accumulation, Slot, part_of
from polyshard.exchange.flight import Averaging, Decoding, InFlight
from polyshard.exchange.gather import Line
from polyshard.exchange.landing import Landing, Placing, check_hook
from polyshard.exchange.packing import Packing, extents_of
from polyshard.exchange.presence import Difference, Presence, Told
from polyshard.exchange.replicas import Replicas, Watch, placing_in
from polyshard.memory.buffers import Recycled
from polyshard.memory.own_storage import own_storage_of_gradient
from polyshard.memory.pages import PagePool
from polyshard.memory.streams import Lanes
from polyshard.params.sharded import Shards
from polyshard.plugins.validation import wordless
from polyshard.seams import BoundReduceCodec, ShardStorage, overrides
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport.base import DONE, Pending, ReduceRoute, Turns, outlives_wait

ReduceHook = Callable[[Tensor], None]
_HOOKS = "_post_accumulate_grad_hooks"


@dataclass
class ReduceSettings:
    """What a user may change about a group's reduction between steps."""

    divide_factor: float | None = None
    reduce_unused: bool = False
    all_reduce: bool = True
    hook: ReduceHook | None = None
    """Called with the averaged shard (``[shard_numel]``, reduce dtype) to change it in place."""


class Reducer:
    """Reduces the gradients of one group. See [Note: reduction]."""

    def __init__(
        self,
        shards: Shards,
        dtype: torch.dtype,
        codec: BoundReduceCodec | None,
        *,
        roles: MeshRoles,
        line: Line,
        waiting: Accumulation,
        check_placed: Callable[[Tensor, object], None],
        placing: Placing,
        lanes: Lanes,
        turns: Turns,
        landing: Landing | None = None,
        pool: PagePool | None = None,
        watch: Watch | None = None,
    ) -> None:
        """Bind routes.

        Args:
            shards: of the group's parameters.
            dtype: gradients are added up in it.
            codec: of gradients, if a plugin has one.
            roles: of the mesh's axes.
            line: to the other ranks.
            waiting: gradients of backwards before, and of those that are not the last.
            check_placed: looks at what the storage makes of the first gradient.
            placing: gives sharded gradients their dtypes.
            lanes: streams of transfers.
            turns: by which ranks tell transfers apart.
            landing: of gradients that land whole on an owner, if any do.
            pool: of pages on the CPU.
            watch: is told more than what is counted.
        """
        self._check_placed: Callable[[Tensor, object], None] | None = check_placed
        self._waiting = waiting
        self._replicas = Replicas(roles, lanes, watch)
        self._place_gradient = placing_in(shards.storage, watch)
        self._packing = Packing(shards.layout, roles.shard_rank, pool)
        self._shards = shards
        self._layout = shards.layout
        self._dtype = dtype
        self._roles = roles
        self._transport = line.transport
        self._route: ReduceRoute = line.reduce_route(extents_of(self._layout, reduced=True), dtype)
        self.rebind(codec)
        self._answers = overrides(self._route.answer, ReduceRoute.answer)
        # See [Note: reduction].
        self._storage_looks = overrides(shards.storage.place_gradient, ShardStorage.place_gradient)
        self._presence = Presence.of(roles, line.tag, len(self._layout.parameters), turns)
        self._totals = Recycled(pool)
        self._placing = placing
        self._landing = landing
        if self._storage_looks and not placing.is_plain:
            raise UnsupportedError(
                f"gradients of {self._names()} are to be {placing} (grad_dtype), and their "
                f"storage takes those of the original dtype {shards.dtype} only. Leave grad_dtype "
                "as it is, or keep these parameters on the device."
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
        coder, replicas = self._coder, None if self._codec is None else self._codec.replicas
        return (
            None if coder is None else coder.payload_bytes,
            None if replicas is None else replicas.payload_bytes,
        )

    @property
    def kept_bytes(self) -> int:
        """Memory of sums that the codec keeps between backwards, at most."""
        return 0 if self._codec is None else self._codec.kept_bytes

    def rebind(self, codec: BoundReduceCodec | None) -> None:
        """Go on with another codec; nothing is in flight."""
        self._codec = self._coder = codec
        self._sums = self._route
        tree = self._route.in_tree() if codec is not None and codec.sums_in_tree else None
        if tree is not None:  # gradients travel as they are
            self._coder, self._sums = None, tree

    @property
    def expects_nothing(self) -> bool:
        """Whether a backward without a gradient of this group is nobody's business."""
        return self._presence is None and not self._sums_partial

    @property
    def _sums_partial(self) -> bool:
        return self._waiting.awaits_replicas and self.settings.all_reduce

    def start(self, gradients: dict[int, Tensor], wire_dtype: torch.dtype) -> tuple[InFlight, int]:
        """Begin to reduce; ``gradients`` maps parameter indices to unsharded gradients.

        Returns:
            The reduction in flight, and the bytes that leave this rank.
        """
        own = None if self._codec is None else self._codec.divisor
        divisor = self.settings.divide_factor or own or float(self._roles.data_parallel_size)
        averaging = Averaging.of(divisor, self._dtype)
        present = sorted(gradients)
        flight = InFlight(DONE, None, present, averaging, wire_dtype, self._tell(present))
        flight.sums_replicas = self.settings.all_reduce
        if not self._may_start_before_hearing:
            self._check(flight)
            flight.told = None
        if not gradients:
            return flight, 0
        sources = {i: averaging.source_of(g, wire_dtype) for i, g in gradients.items()}
        sent = 0
        if self._landing is not None:
            check_hook(self.settings.hook)
            flight.landing, sent = self._landing.start(sources)
            flight.present = present = sorted(sources)
            if not sources:
                return flight, sent
        device = next(iter(sources.values())).device
        total = flight.total = self._new_total(present, device)
        if self._codec is not None:
            self._codec.begin(frozenset(sources))
        if self._coder is not None:
            flight.pending = self._start_codec(self._coder, sources, total)
            return flight, (self._layout.world_size - 1) * self._coder.payload_bytes
        pieces, flight.scratch = self._packing.pieces(sources, wire_dtype)
        flight.pending = self._sums.start(pieces, self._packing.piece_outs(total))
        flight.sources = () if outlives_wait(flight.pending) else pieces
        if self._codec is None:
            self._replicas.follow(flight, self._waiting.partial)
        return flight, sent + self._route.sent_bytes(pieces)

    # Agreement --------------------------------------------------------------------------------

    def _tell(self, present: list[int]) -> Told | None:
        """See [Note: presence] in presence.py."""
        if self._presence is None:
            return None
        summed = self._waiting.partial.present.union(present, self._waiting.owned)
        replicas = self._roles.is_replicated and self.settings.all_reduce
        return self._presence.tell(present, summed, sums_replicas=replicas)

    @property
    def _may_start_before_hearing(self) -> bool:
        """Whether transfers can be ended that not all ranks started.

        Collectives pair by order: one that a rank does not join would shift all later ones.
        """
        return self._landing is None and (self._coder is not None or self._answers)

    def _check(self, flight: InFlight) -> None:
        """Wait for what others said.

        Raises:
            GradientMismatchError: on every rank, where gradients cannot be summed.
        """
        if flight.told is None:
            return
        try:
            difference = flight.told.hear()
        except RuntimeError as error:
            error.add_note(
                f"while this rank waited for others to reduce gradients of {self._names()}: a rank "
                "that failed before, or whose backward does not reach them, never comes"
            )
            raise
        if difference is None:
            return
        if self._may_start_before_hearing:
            self._play_out(flight, difference)
        raise GradientMismatchError(difference.describe(self._names()))

    def _names(self) -> list[str]:
        return [p.info.fqn for p in self._shards.parameters]

    def _play_out(self, flight: InFlight, difference: Difference) -> None:
        """End a reduction that not all ranks started alike, so that no message of it is left."""
        ended: list[Pending] = [flight.pending]
        if self._coder is not None:
            if flight.total is None:
                size = (2, self._layout.world_size, self._coder.payload_bytes)
                payloads = torch.zeros(size, dtype=torch.uint8, device=self._roles.device)
                ended.append(self._transport.exchange(*payloads))
        else:
            own = self._packing.takes_part(difference.present(dist.get_rank()))
            for peer, rank in enumerate(self._roles.shard_members):
                takes_part = self._packing.takes_part(difference.present(rank))
                if takes_part != own:
                    ended.append(self._route.answer(peer, takes_part, flight.wire_dtype))
        for pending in reversed(ended):
            pending.wait()
        if flight.scratch is not None:
            self._packing.give_back(flight.scratch)

    # Packing ----------------------------------------------------------------------------------

    def _new_total(self, present: Sequence[int], device: torch.device) -> Tensor:
        """Memory for the sums, with zeros where no gradient comes if anybody may look there."""
        numel = self._layout.shard_numel
        total = self._totals.take(numel, self._dtype, device)
        if self._is_exposed:
            self._packing.clear_blanks(total, present, packs=self._coder is None)
        return total

    @property
    def _is_exposed(self) -> bool:
        """Whether anybody sees sums as a whole: see [Note: reduction]."""
        return self._roles.is_replicated or self.settings.hook is not None or self._storage_looks

    def _start_codec(
        self, codec: BoundReduceCodec, sources: dict[int, Tensor], total: Tensor
    ) -> Pending:
        shape = (2, self._layout.world_size, codec.payload_bytes)
        scratch = self._packing.take_scratch(math.prod(shape), total.device)
        payloads, received = scratch.tensor.view(shape)
        chunks = self._packing.chunks(sources, total)
        wordless(cast("Any", codec).encode(chunks, payloads), codec, "encode")
        pending = self._transport.exchange(payloads, received)
        outs = self._packing.chunk_outs(total)
        return Decoding(pending, codec, received, outs, scratch, self._packing.give_back)

    def predicted_bytes(self, gradients: dict[int, Tensor], wire_dtype: torch.dtype) -> int:
        """Bytes :meth:`start` would send for gradients of these shapes (meta tensors will do)."""
        world = self._layout.world_size
        if not gradients:
            return 0
        if self._coder is not None:
            return (world - 1) * self._coder.payload_bytes
        sources = {i: g.to(wire_dtype) for i, g in gradients.items()}
        if self._landing is not None:
            whole = self._landing.sent_bytes(sources)
            rows = {i: g for i, g in sources.items() if i not in self._landing.owned}
            return whole + self._route.sent_bytes(self._packing.stand_ins(rows, wire_dtype))
        return self._route.sent_bytes(self._packing.stand_ins(sources, wire_dtype))

    def finish(self, flight: InFlight) -> bool:
        """Wait, and put sharded gradients in place: the one way in, with :meth:`place_held`.

        Returns:
            Whether any are: not while they wait (see [Note: gradients that wait] in
            accumulation.py), nor where no rank has any.

        Raises:
            GradientMismatchError: on every rank, where they have gradients of other parameters.
        """
        placed = self._placed(flight)  # by now nothing here holds what was moved elsewhere
        is_landed = self._landing is not None and self._land(self._landing, flight)
        if placed is None:
            return is_landed
        self._store(placed, flight.present)
        return True

    def _land(self, landing: Landing, flight: InFlight) -> bool:
        """Put in place what lands whole; whether there is any."""
        sums = flight.sums_replicas or not self._roles.is_replicated
        placed = landing.finish(flight.landing, flight.averaging, sums_replicas=sums)
        for owned in placed:
            _run_hooks(owned.parameter)
        landing.tell(placed, is_last=flight.is_last)
        return bool(placed)

    def place_held(self) -> bool:
        """Put in place what was held and no reduction of the last backward took along, if any."""
        held = self._waiting.held
        if not held:
            return False
        total, present = held.take()
        self._store(self._place(total), present)
        return True

    def _placed(self, flight: InFlight) -> Tensor | None:
        """What came of a reduction (``[shard_numel]``, original dtype), where gradients rest."""
        self._check(flight)
        flight.pending.wait()
        if flight.scratch is not None:
            self._packing.give_back(flight.scratch)
        if self._codec is not None and flight.total is not None:
            flight.total = self._codec.keep(flight.total)
            if flight.total is None:
                return None
        total = flight.total if flight.is_summed else self._summed(flight)
        if total is None:
            return None
        if flight.averaging.after != 1.0:
            total.div_(flight.averaging.after)
        if self.settings.hook is not None:
            self.settings.hook(total)
        total = self._placing.cast(total)
        flight.pending = DONE  # with the memory that it kept
        storage, held = self._shards.storage, self._waiting.held
        if held or (not flight.is_last and storage.holds_gradients):
            held.add(total, flight.present)
            if not flight.is_last:
                return None
            total, flight.present = held.take()
        return self._place(total)

    def _place(self, gradient: Tensor) -> Tensor:
        """Next to the resting shard; the storage's first answer is looked at."""
        placed = self._place_gradient(gradient)
        if self._check_placed is not None:
            self._check_placed(gradient, placed)
            self._check_placed = None
        return placed

    def _summed(self, flight: InFlight) -> Tensor | None:
        """The sum over all ranks, partial sums included; ``None`` while there is none."""
        if not self._roles.is_replicated:
            return flight.total
        partial = self._waiting.partial
        if flight.total is not None and (partial or not flight.sums_replicas):
            partial.add(flight.total, flight.present)
        if not flight.sums_replicas:
            return None
        total = flight.total
        if partial:
            total, flight.present = partial.take()
        if total is not None:
            self._replicas.sum(total, None if self._codec is None else self._codec.replicas)
        return total

    def _store(self, total: Tensor, present: Sequence[int]) -> None:
        """Set or add to ``.grad`` of the sharded parameters, then run their hooks."""
        parameters = [self._shards.parameters[index].parameter for index in present]
        hooked = [p for p in parameters if getattr(p, _HOOKS, None)]
        for part, indices in self._placing.parts(total, present):
            self._put(part, indices, is_seen=bool(hooked))
        for parameter in hooked:
            _run_hooks(parameter)

    def _put(self, total: Tensor, present: Sequence[int], *, is_seen: bool) -> None:
        """The part of one dtype; ``is_seen`` where hooks look at it at once."""
        accumulate_into: list[Tensor] = []
        accumulate_from: list[Tensor] = []
        parts = self._totals.parts_of(total)
        owns_memory(total)
        for index in present:
            sharded, slot = self._shards.parameters[index], self._slots[index]
            if sharded.parameter.grad is None:
                part = parts.get(index)
                if part is None:
                    part = parts[index] = own_storage_of_gradient(part_of(total, slot))
                sharded.parameter.grad = sharded.wrap(part.detach())
            else:
                accumulate_into.append(local_tensor(cast("DTensor", sharded.parameter.grad)))
                accumulate_from.append(part_of(total, slot))
        if accumulate_into or is_seen:
            self._shards.storage.settle()
        if accumulate_into:
            torch._foreach_add_(accumulate_into, accumulate_from)
            self._totals.drop()  # gradients live elsewhere: this would be a second copy of them
        else:
            self._totals.keep_only_if_used_by(total)


def _run_hooks(parameter: Tensor) -> None:
    for hook in tuple((getattr(parameter, _HOOKS, None) or {}).values()):
        hook(parameter)
