"""How gradients are reduced: the operations from what autograd wrote to sharded gradients.

[Note: reduction]
A direct gradient is sent from the memory autograd wrote it to; staged ones are packed first. What
arrives is summed per shard and averaged once. The wire dtype must be the same on all ranks even if
they accumulated differently, so it follows from settings alone: the reduce dtype after backwards
without synchronisation, else the parameter dtype. Sums are in the reduce dtype. fp16 sums are
divided in two steps around the sum, so that neither overflows (as DDP and FSDP do).

The sum of a whole shard has parts that no gradient fills: parameters without one, and padding.
Where something sees all of it (a hook, replicas, a storage) they are zero; else they are undefined.

[Note: replicas]
Sums over the replicate axis use other links than what the shard axis needs next. So where the
device has streams they follow the reduce-scatter on a lane of their own, up to the end of the
backward: what the reduce-scatter read is free before. Two things keep them on the compute lane,
after the join: a codec, whose working memory belongs to that lane, and a transfer that has to be
waited for.

[Note: departures]
A storage that takes gradients off the device copies them: beside the computation, on the lane of
the last transfer, where what makes a gradient of the sum runs as well. Where nothing else uses the
sum, its memory is that lane's, and goes back there once the copy is launched. Two things keep this
on the compute lane, after the join: a user's hook on sums and a codec. So does a storage for which
the host has to wait (a file).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from polyshard._torch.private import local_tensor
from polyshard._torch.record_stream import owns_memory
from polyshard.errors import GradientMismatchError, UnsupportedError
from polyshard.memory.buffers import Recycled
from polyshard.memory.own_storage import own_storage_of_gradient
from polyshard.memory.pages import PagePool
from polyshard.memory.streams import Lanes
from polyshard.params.sharded import Shards
from polyshard.plugins.contributions import LANDING, REDUCE_CODEC, STORAGE, Contributions
from polyshard.plugins.seams import BoundReduceCodec, ShardStorage, overrides
from polyshard.plugins.validation import wordless
from polyshard.program.accumulation import Accumulation, Slot, part_of
from polyshard.program.executor import new_frame
from polyshard.program.landing import Landing, Placing, check_hook
from polyshard.program.meter import Meter
from polyshard.program.ops import Frame, Lane, Memory, Op, Program, Traffic, compiled
from polyshard.program.packing import Averaging, Packing, extents_of
from polyshard.program.unshard import ShardAxis, join
from polyshard.transport import all_gather, all_reduce, presence_of
from polyshard.transport.base import DONE, ReduceRoute, Turn
from polyshard.transport.custom import refuse_unused

if TYPE_CHECKING:
    from polyshard.transport.gloo.presence import Difference, Presence

ReduceHook = Callable[[Tensor], None]
_HOOKS = "_post_accumulate_grad_hooks"
TABLES = 8
"""Sets of present gradients whose tables are kept."""


@dataclass(frozen=True)
class ReduceSettings:
    """What a user may change about a group's reduction between steps."""

    divide_factor: float | None = None
    reduce_unused: bool = False
    hook: ReduceHook | None = None
    """Called with the averaged shard (``[shard_numel]``, reduce dtype) to change it in place."""


class Key(NamedTuple):
    """What decides the program of a reduction, beside the group's settings."""

    has_rows: bool
    """Whether this rank has a gradient that lands in rows."""
    has_whole: bool
    """Whether it has one that lands whole on an owner."""
    is_last: bool
    """Whether no backward of this iteration follows."""
    all_reduces: bool
    """Whether replicas are summed, too."""
    wire: torch.dtype


@dataclass(frozen=True)
class Table:
    """What depends on which gradients are present. Kept for the sets that came last."""

    present: frozenset[int]
    rows: list[int]
    """Those that land in rows, ascending."""
    blanks: list[tuple[int, int]]
    """Ranges of the sum that none of them fills."""
    traffic: dict[Key, Traffic] = field(default_factory=dict)
    """What this rank moves, by program."""


@dataclass
class _Parts:
    """The two parts of a program that is being made."""

    issue: list[Op] = field(default_factory=list)
    complete: list[Op] = field(default_factory=list)


class Reducer:
    """Makes the programs that reduce the gradients of one group. See [Note: reduction]."""

    def __init__(
        self,
        shards: Shards,
        axis: ShardAxis,
        codec: BoundReduceCodec | None,
        contributions: Contributions,
        *,
        waiting: Accumulation,
        placing: Placing,
        meter: Meter,
        landing: Landing | None = None,
        pool: PagePool | None = None,
    ) -> None:
        """Bind routes.

        Args:
            shards: of the group's parameters.
            axis: to the other ranks.
            codec: of gradients, if a plugin has one.
            contributions: the plugins of codec and storage.
            waiting: gradients of backwards before, and of those that are not the last.
            placing: the dtypes of sums and of sharded gradients.
            meter: is told what moves.
            landing: of gradients that land whole on an owner, if any do.
            pool: of pages on the CPU.
        """
        self._contributions, self._is_checked = contributions, False
        self._plugin = contributions.plugin_of(contributions[REDUCE_CODEC])
        self._waiting, self._meter = waiting, meter
        self._shards, self._storage, self._layout = shards, shards.storage, shards.layout
        self._placing, self._landing, self._dtype = placing, landing, placing.sums
        self._roles, self._transport = axis.roles, axis.transport
        self._packing = Packing(self._layout, axis.rank, pool)
        self._route = axis.reduce_route(extents_of(self._layout, reduced=True), self._dtype)
        self._tables: dict[frozenset[int], Table] = {}
        if landing is not None:
            by = contributions.plugin_of(contributions[LANDING])
            refuse_unused(self._route, self._names(), f"{by} sends them whole to owners")
        self.rebind(codec)
        self._answers = overrides(self._route.answer, ReduceRoute.answer)
        # See [Note: reduction].
        self._is_moved = overrides(self._storage.place_gradient, ShardStorage.place_gradient)
        self._presence = presence_of(
            axis.roles, axis.tag, len(shards.parameters), shards.turn or Turn()
        )
        self._totals = Recycled(pool)
        if self._is_moved and not placing.is_plain:
            raise UnsupportedError(
                f"gradients of {self._names()} are to be {placing} (grad_dtype), and their "
                f"storage takes those of the original dtype {shards.dtype} only. Leave grad_dtype "
                "as it is, or keep these parameters on the device."
            )
        # What local_view() would work out for every gradient of every step.
        self._slots: list[Slot] = [
            (shape, torch.empty(shape, device="meta").stride(), placed.shard_offset)
            for placed in self._layout.parameters
            for shape in (placed.local_shape(axis.rank),)
        ]

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

    @property
    def codec(self) -> BoundReduceCodec | None:
        """What encodes gradients, if a plugin's codec does."""
        return self._codec

    def rebind(self, codec: BoundReduceCodec | None) -> None:
        """Use another codec from now on; nothing is in flight, and programs are made anew."""
        if codec is not None:
            refuse_unused(self._route, self._names(), f"{self._plugin} encodes them")
        self._codec = self._coder = codec
        self._sums = self._route
        tree = self._route.in_tree() if codec is not None and codec.sums_in_tree else None
        if tree is not None:  # gradients travel as they are
            self._coder, self._sums = None, tree
        self._tables.clear()

    def expects_nothing(self, *, all_reduces: bool) -> bool:
        """Whether a backward without a gradient of this group needs no reduction."""
        sums_partial = self._waiting.awaits_replicas and all_reduces
        return self._presence is None and not sums_partial

    # Programs ---------------------------------------------------------------------------------

    def frame(
        self,
        gradients: dict[int, Tensor],
        wire: torch.dtype,
        settings: ReduceSettings,
        lanes: Lanes,
        programs: dict[Key, Program],
        *,
        is_last: bool,
        all_reduces: bool,
    ) -> Frame:
        """A run that reduces ``gradients``, unsharded ones by parameter index; nothing has begun.

        ``programs`` are those made under ``settings`` so far.

        Raises:
            UnsupportedError: for a hook on sums where some gradients land whole.
        """
        present = frozenset(gradients)
        table = self._tables.get(present) or self.table(present)
        has_whole = len(table.rows) < len(gradients)
        key = Key(bool(table.rows), has_whole, is_last, all_reduces, wire)
        program = programs.get(key)
        if program is None:
            program = programs[key] = self.program(key, settings)
        if key not in table.traffic:
            table.traffic[key] = program.traffic(present)
        frame = new_frame(program, lanes, self._roles.device)
        frame.gradients, frame.table, frame.present = gradients, table, table.rows
        frame.key = key
        return frame

    def program(
        self, key: Key, settings: ReduceSettings, present: frozenset[int] = frozenset()
    ) -> Program:
        """What is done for ``key``, with the bytes of these parameters' gradients.

        Raises:
            UnsupportedError: for a hook on sums where some gradients land whole.
        """
        if self._landing is not None and (key.has_rows or key.has_whole):
            check_hook(settings.hook)
        own = None if self._codec is None else self._codec.divisor
        divisor = settings.divide_factor or own or float(self._roles.data_parallel_size)
        averaging = Averaging.of(divisor, self._dtype)
        parts = _Parts()
        if self._presence is not None:
            self._tell(self._presence, key, parts)
        if self._landing is not None:
            self._land(self._landing, averaging, key, parts)
        if key.has_rows:
            self._sum_shards(averaging, key, settings, parts)
        if self._sum_replicas(key, parts):
            self._place(averaging, key, settings, parts)
        # What a storage moves off the device should leave while the computation continues.
        frees = self._follows(key) and self._landing is None and not self._is_moved
        return compiled("reduce", parts.issue, parts.complete, present, early=int(frees))

    def planned(self, present: Iterable[int], wire: torch.dtype) -> Program:
        """What a plan shows: the last reduction of an iteration, of these parameters' gradients."""
        table = self.table(frozenset(present))
        has_whole = len(table.rows) < len(table.present)
        key = Key(bool(table.rows), has_whole, is_last=True, all_reduces=True, wire=wire)
        return self.program(key, ReduceSettings(), table.present)

    def table(self, present: frozenset[int]) -> Table:
        """What follows from the set of parameters that have a gradient."""
        table = self._tables.get(present)
        if table is None:
            if len(self._tables) >= TABLES:
                del self._tables[next(iter(self._tables))]
            whole = {} if self._landing is None else self._landing.owned
            rows = [index for index in sorted(present) if index not in whole]
            blanks = self._packing.blanks(rows, packs=self._coder is None)
            table = self._tables[present] = Table(present, rows, blanks)
        return table

    # Agreement --------------------------------------------------------------------------------

    def summed(self, frame: Frame) -> frozenset[int] | None:
        """Parameters that get a gradient if all ranks agree; ``None`` if replicas sum later."""
        waiting = self._waiting
        present: frozenset[int] = frame.table.present
        if not self._roles.is_replicated:
            return present
        if not frame.key.all_reduces:
            return None
        if waiting.awaits_replicas:
            return waiting.partial.present.union(present, waiting.owned)
        return present

    def _tell(self, presence: Presence, key: Key, parts: _Parts) -> None:
        """See [Note: presence] in presence.py."""
        replicas = self._roles.is_replicated and key.all_reduces

        def tell(frame: Frame) -> None:
            present, summed = frame.table.present, self.summed(frame)
            frame.said = presence.tell(present, summed or present, sums_replicas=replicas)

        def unsay(frame: Frame) -> None:
            if frame.said is not None:
                frame.said.works.wait()

        def hear(frame: Frame) -> None:
            said, frame.said = frame.said, None
            try:
                difference = said.hear()
            except RuntimeError as error:
                error.add_note(
                    f"while this rank waited for others to reduce gradients of {self._names()}: a "
                    "rank that failed before, or whose backward does not reach them, never comes"
                )
                raise
            if difference is not None:
                self._refuse(frame, difference, key.wire)

        traffic = Traffic(control=presence.control_bytes)
        parts.issue.append(Op("tell", tell, undo=unsay, traffic=lambda _: traffic))
        comes_first = not self._may_start_before_hearing
        (parts.issue if comes_first else parts.complete).append(Op("hear", hear))

    @property
    def _may_start_before_hearing(self) -> bool:
        """Whether transfers can be ended that not all ranks started.

        Collectives pair by order: one that a rank does not join would shift all later ones.
        """
        return self._landing is None and (self._coder is not None or self._answers)

    def _refuse(self, frame: Frame, difference: Difference, wire: torch.dtype) -> NoReturn:
        """End a reduction of gradients that cannot be summed.

        Raises:
            GradientMismatchError: on every rank.
        """
        if self._may_start_before_hearing:
            self._play_out(frame, difference, wire)
        raise GradientMismatchError(difference.describe(self._names()))

    def _names(self) -> list[str]:
        return [p.info.fqn for p in self._shards.parameters]

    def _play_out(self, frame: Frame, difference: Difference, wire: torch.dtype) -> None:
        """End a reduction that not all ranks started alike, so that no message of it is left."""
        ended = [] if frame.pending is None else [frame.pending]
        frame.pending = None
        if self._coder is not None:
            if not ended:
                size = (2, self._layout.world_size, self._coder.payload_bytes)
                payloads = torch.zeros(size, dtype=torch.uint8, device=self._roles.device)
                ended.append(self._transport.exchange(*payloads))
        else:
            own = self._packing.takes_part(difference.present(dist.get_rank()))
            for peer, rank in enumerate(self._roles.shard_members):
                takes_part = self._packing.takes_part(difference.present(rank))
                if takes_part != own:
                    ended.append(self._route.answer(peer, takes_part, wire))
        for pending in reversed(ended):
            pending.wait()
        self._give_back(frame)

    # Over the shard axis ----------------------------------------------------------------------

    def _sum_shards(
        self, averaging: Averaging, key: Key, settings: ReduceSettings, parts: _Parts
    ) -> None:
        """Send what lands in rows, and sum it."""
        is_seen = self._roles.is_replicated or settings.hook is not None or self._is_moved
        if self._coder is not None:
            self._send_payloads(self._coder, averaging, key, parts, is_seen=is_seen)
        else:
            departure = self._departure(key, settings)
            self._send_rows(averaging, key, parts, departure, is_seen=is_seen)
        if self._codec is not None:
            self._keep(self._codec, parts)

    def _send_rows(
        self,
        averaging: Averaging,
        key: Key,
        parts: _Parts,
        departure: Lane,
        *,
        is_seen: bool,
    ) -> None:
        """Each piece from where it is. See [Note: departures]."""
        wire, packing, route, codec = key.wire, self._packing, self._sums, self._codec
        leaves = departure is Lane.REDUCE
        prepare = route.prepare if overrides(route.prepare, ReduceRoute.prepare) else None

        def pack(frame: Frame) -> None:
            sources = averaging.sources_of(frame.gradients, wire)
            if codec is not None:
                codec.begin(frozenset(sources))
            frame.pieces, frame.packed = packing.pieces(sources, wire)
            sources.clear()  # callers further up hold it: what is cast is freed before the next is
            if prepare is not None:
                prepare(frame.pieces)
            if not leaves:
                frame.total = self._new_total(frame, is_seen=is_seen)

        def scatter(frame: Frame) -> None:
            if leaves:  # memory of this lane's, which alone uses it
                frame.total = self._new_total(frame, is_seen=is_seen)
            frame.pending = route.start(frame.pieces, packing.piece_outs(frame.total))

        def taken(present: frozenset[int]) -> tuple[int, int]:
            pieces = packing.stand_ins(self.table(present).rows, wire)
            packed = pieces[-1] if self._layout.staged else None
            return (0 if packed is None else packed.nbytes) + route.scratch_bytes(pieces), 0

        def freed(present: frozenset[int]) -> tuple[int, int]:
            return 0, taken(present)[0]

        reads, made = (Memory.GRADIENTS,), (Memory.PACKED, Memory.TOTAL)
        sends = partial(self._sent, wire)
        lane = Lane.REDUCE if route.on_stream else Lane.COMPUTE
        parts.issue += [
            Op("pack", pack, reads=reads, writes=made, undo=self._give_back, memory=taken),
            Op("scatter", scatter, lane, (*reads, Memory.PACKED), (Memory.TOTAL,), join, sends),
        ]
        if self._follows(key):
            sent_memory = (Memory.PACKED,)
            free = Op("free what was sent", self._give_back, writes=sent_memory, memory=freed)
            parts.complete.append(free)
        else:
            reads, written = (Memory.TOTAL,), (Memory.PACKED,)
            ended = Op("join", self._join, reads=reads, writes=written, memory=freed)
            parts.complete.append(ended)

    def _sent(self, wire: torch.dtype, present: frozenset[int]) -> Traffic:
        """Of rows, by this rank."""
        pieces, route = self._packing.stand_ins(self.table(present).rows, wire), self._sums
        return Traffic(route.sent_bytes(pieces), route.received_bytes(pieces))

    def _send_payloads(
        self,
        codec: BoundReduceCodec,
        averaging: Averaging,
        key: Key,
        parts: _Parts,
        *,
        is_seen: bool,
    ) -> None:
        """Through the payloads of a plugin's codec."""
        wire, packing, transport = key.wire, self._packing, self._transport
        shape = (2, self._layout.world_size, codec.payload_bytes)
        asked: Any = codec  # its answers are looked at, though it should have none

        def encode(frame: Frame) -> None:
            sources = averaging.sources_of(frame.gradients, wire)
            frame.gradients = {}
            total = frame.total = self._new_total(frame, is_seen=is_seen)
            codec.begin(frozenset(sources))
            frame.packed = packing.take_scratch(math.prod(shape), total.device, is_shown=True)
            chunks = packing.chunks(sources, total)
            payloads = frame.packed.tensor.view(shape)[0]
            wordless(asked.encode(chunks, payloads), codec, "encode")
            sources.clear()  # see _send_rows

        def exchange(frame: Frame) -> None:
            frame.pending = transport.exchange(*frame.packed.tensor.view(shape))

        def decode(frame: Frame) -> None:
            received, outs = frame.packed.tensor.view(shape)[1], packing.chunk_outs(frame.total)
            wordless(asked.decode_sum(received, outs), codec, "decode_sum")
            self._give_back(frame)

        nbytes = (self._layout.world_size - 1) * codec.payload_bytes
        moved, by, taken = Traffic(nbytes, nbytes), self._plugin, math.prod(shape)
        made = (Memory.PAYLOAD, Memory.PAYLOADS, Memory.TOTAL)
        read, written = (Memory.PAYLOAD,), (Memory.PAYLOADS,)
        lane = Lane.REDUCE if transport.exchanges_on_stream else Lane.COMPUTE
        undo = self._give_back
        parts.issue += [
            Op(
                "encode",
                encode,
                reads=(Memory.GRADIENTS,),
                writes=made,
                undo=undo,
                memory=lambda _: (taken, 0),
                plugin=by,
            ),
            Op("exchange", exchange, lane, read, written, join, lambda _: moved),
        ]
        parts.complete += [
            Op("join", join, reads=(*read, *written)),
            Op(
                "decode",
                decode,
                reads=written,
                writes=(*read, Memory.TOTAL),
                memory=lambda _: (0, taken),
                plugin=by,
            ),
        ]

    def _keep(self, codec: BoundReduceCodec, parts: _Parts) -> None:
        """The codec may keep the sum of one backward for itself."""

        def keep(frame: Frame) -> bool:
            frame.total = codec.keep(frame.total)
            return frame.total is None

        parts.complete.append(Op("keep", keep, writes=(Memory.TOTAL,), plugin=self._plugin))

    def _join(self, frame: Frame) -> None:
        """As :func:`join`, in one call for every step; then give back what was sent."""
        pending, frame.pending = frame.pending, None
        if pending is not None and pending is not DONE:
            try:
                pending.wait()
            except BaseException:
                frame.is_torn = True
                raise
        self._give_back(frame)

    def _give_back(self, frame: Frame) -> None:
        """Nothing reads what was sent any more."""
        packed, frame.packed, frame.pieces = frame.packed, None, None
        if packed is not None and not frame.is_torn:
            packed.release()
            self._packing.scratch = packed

    def _new_total(self, frame: Frame, *, is_seen: bool) -> Tensor:
        """Memory for the sums, with zeros where no gradient comes if anything may look there."""
        total = self._totals.take(self._layout.shard_numel, self._dtype, self._roles.device)
        if is_seen and frame.table.blanks:
            torch._foreach_zero_([total[start:stop] for start, stop in frame.table.blanks])
        return total

    # Over the replicate axes ------------------------------------------------------------------

    def _follows(self, key: Key) -> bool:
        """Whether sums over replicas follow on their own lane. See [Note: replicas]."""
        route = self._sums
        on_lane = route.on_stream and not route.is_awaited
        sums = self._roles.is_replicated and key.all_reduces
        return key.has_rows and on_lane and sums and self._codec is None

    def _sum_replicas(self, key: Key, parts: _Parts) -> bool:
        """Sum over replicas, partial sums of earlier backwards included.

        Returns:
            Whether there may be a sum to be placed.
        """
        if not self._roles.is_replicated:
            return key.has_rows
        waiting = self._waiting  # whose sums a rollback replaces

        def hold(frame: Frame) -> bool:
            waiting.partial.add(frame.total, frame.present)
            return True

        def add(frame: Frame) -> bool:
            if not waiting.partial:
                return frame.total is None
            earlier, present = waiting.partial.take()
            frame.kept += (earlier,)
            if frame.total is None:
                frame.total, frame.present = earlier, present
            else:
                frame.total.add_(earlier)
                frame.present = sorted({*present, *frame.present})
            return False

        total, both = (Memory.TOTAL,), (Memory.TOTAL, Memory.PARTIAL)
        if not key.all_reduces:
            if key.has_rows:
                parts.complete.append(Op("hold", hold, reads=total, writes=(Memory.PARTIAL,)))
            return False
        follows = self._follows(key)
        lane = Lane.REPLICA if follows else Lane.COMPUTE
        replicas = None if self._codec is None else self._codec.replicas
        nbytes = self._layout.shard_numel * self._dtype.itemsize
        moved = Traffic(replicas=nbytes if replicas is None else replicas.payload_bytes)
        by = "polyshard" if replicas is None else self._plugin
        ops = parts.issue if follows else parts.complete
        ops += [
            Op("add partial", add, lane, (Memory.PARTIAL,), both),
            Op("sum replicas", self._sum, lane, total, total, traffic=lambda _: moved, plugin=by),
        ]
        parts.complete.append(Op("let go", _let_go, reads=total, writes=(Memory.PARTIAL,)))
        return True

    def _sum(self, frame: Frame) -> None:
        """Sum ``total`` over replicas in place, on the current stream."""
        codec = None if self._codec is None else self._codec.replicas
        groups, total, begin = self._roles.replicate_groups, frame.total, time.perf_counter()
        if codec is None or len(groups) != 1:
            for group in groups:
                all_reduce(total, group)
            nbytes = total.nbytes
        else:
            nbytes = codec.payload_bytes
            payload = total.new_empty(nbytes, dtype=torch.uint8)
            payloads = payload.new_empty(self._roles.replicate_size, nbytes)
            wordless(cast("Any", codec).encode(total, payload), codec, "encode")
            all_gather(payloads, payload, groups[0])
            wordless(cast("Any", codec).decode_sum(payloads, total), codec, "decode_sum")
        if self._meter.step_observers:
            self._meter.tell("on_replicas_summed", nbytes, time.perf_counter() - begin)

    # Whole, on owners -------------------------------------------------------------------------

    def _land(self, landing: Landing, averaging: Averaging, key: Key, parts: _Parts) -> None:
        """Send what lands whole to its owner, and put it in place there."""
        sums = key.all_reduces or not self._roles.is_replicated

        def send(frame: Frame) -> None:
            owned = {i: frame.gradients.pop(i) for i in landing.owned if i in frame.gradients}
            frame.landing = landing.start(averaging.sources_of(owned, key.wire))

        def drop(frame: Frame) -> None:
            for _, pending in (frame.landing or {}).values():
                pending.wait()

        def land(frame: Frame) -> None:
            arriving, frame.landing = frame.landing or {}, None
            placed = landing.finish(arriving, averaging.after, sums_replicas=sums)
            for owned in placed:
                run_hooks(owned.parameter)
            landing.tell(placed, is_last=key.is_last)
            frame.has_placed = bool(placed)

        def sent(present: frozenset[int]) -> Traffic:
            return landing.traffic(present, key.wire)

        if key.has_whole:
            reads = (Memory.GRADIENTS,)
            parts.issue.append(Op("send whole", send, reads=reads, undo=drop, traffic=sent))
        parts.complete.append(Op("land", land, writes=(Memory.GRAD,)))

    # In place ---------------------------------------------------------------------------------

    def _place(
        self, averaging: Averaging, key: Key, settings: ReduceSettings, parts: _Parts
    ) -> None:
        """From a sum to sharded gradients."""
        total, held = (Memory.TOTAL,), (Memory.HELD,)
        lane = self._departure(key, settings)
        ops = parts.complete if lane is Lane.COMPUTE else parts.issue
        if lane is Lane.REPLICA:
            ops.append(Op("keep sum", _keep_sum, lane, total))
        if averaging.after != 1.0:
            scale = partial(_scale, averaging.after)
            ops.append(Op("scale", scale, lane, total, total))
        if settings.hook is not None:
            call = partial(_call, settings.hook)
            ops.append(Op("hook", call, lane, total, total, plugin="user"))
        if not self._placing.keeps(self._dtype):
            ops.append(Op("cast", self._cast, lane, total, total))
        if self._storage.holds_gradients and not key.is_last:
            ops.append(Op("hold", self._hold, reads=total, writes=held))
            return
        if self._storage.holds_gradients:
            ops.append(Op("take held", self._take_held, lane, held, total))
        if self._is_moved:
            plugin = self._contributions.plugin_of(self._contributions[STORAGE])
            ops.append(Op("place", self._move, lane, total, total, plugin=plugin))
        if lane is not Lane.COMPUTE:
            parts.complete.append(Op("let go", _let_go, reads=total, writes=held))
        parts.complete.append(Op("store", self._store, reads=total, writes=(Memory.GRAD,)))

    def _departure(self, key: Key, settings: ReduceSettings) -> Lane:
        """Where a sum becomes a gradient that leaves the device. See [Note: departures]."""
        if not (self._storage.places_on_stream and self._is_moved and key.is_last):
            return Lane.COMPUTE
        if self._follows(key):
            lane = Lane.REPLICA
        elif self._sums.on_stream and not (self._sums.is_awaited or self._roles.is_replicated):
            lane = Lane.REDUCE
        else:
            return Lane.COMPUTE
        is_ours = key.has_rows and self._codec is None and settings.hook is None
        return lane if is_ours else Lane.COMPUTE

    def _cast(self, frame: Frame) -> None:
        frame.total = self._placing.cast(frame.total)

    def _hold(self, frame: Frame) -> bool:
        self._waiting.held.add(frame.total, frame.present)
        return True

    def _take_held(self, frame: Frame) -> None:
        held = self._waiting.held
        if held:
            earlier, present = held.take()
            frame.kept += (earlier,)
            frame.total.add_(earlier.to(frame.total.device))
            frame.present = sorted({*present, *frame.present})

    def place_held(self) -> bool:
        """Put in place what was held and no reduction of the last backward took along, if any."""
        held = self._waiting.held
        if not held:
            return False
        frame = Frame()
        frame.total, frame.present = held.take()
        self._move(frame)
        self._store(frame)
        return True

    def _move(self, frame: Frame) -> None:
        """Next to the resting shard; the storage's first answer is looked at."""
        gradient, begin = frame.total, time.perf_counter()
        placed = self._storage.place_gradient(gradient)
        if self._meter.step_observers and self._is_moved:
            self._meter.tell("on_staged", "place", gradient.nbytes, time.perf_counter() - begin)
        if not self._is_checked:
            fix = "return the gradient, next to the resting shard."
            self._contributions.alike(self._storage, "place_gradient", placed, gradient, fix)
            self._is_checked = True
        frame.total = placed

    def _store(self, frame: Frame) -> None:
        """Set or add to ``.grad`` of the sharded parameters, then run their hooks."""
        total, present, frame.has_placed = frame.total, frame.present, True
        hooked: list[Tensor] = []
        for index in present:
            held = self._shards.parameters[index].parameter
            if getattr(held, _HOOKS, None):
                hooked.append(held)
        if self._placing.is_single:
            self._put(total, present, is_seen=bool(hooked))
        else:
            for part, indices in self._placing.parts(total, present):
                self._put(part, indices, is_seen=bool(hooked))
        for parameter in hooked:
            run_hooks(parameter)

    def _put(self, total: Tensor, present: Sequence[int], *, is_seen: bool) -> None:
        """The part of one dtype; ``is_seen`` where hooks look at it at once."""
        accumulate_into: list[Tensor] = []
        accumulate_from: list[Tensor] = []
        parts, is_cut = self._totals.parts_of(total), False
        for index in present:
            sharded, slot = self._shards.parameters[index], self._slots[index]
            if sharded.parameter.grad is None:
                part = parts.get(index)
                if part is None:
                    is_cut = True
                    part = parts[index] = own_storage_of_gradient(part_of(total, slot))
                sharded.parameter.grad = sharded.wrap(part.detach())
            else:
                accumulate_into.append(local_tensor(cast("DTensor", sharded.parameter.grad)))
                accumulate_from.append(part_of(total, slot))
        if is_cut:
            owns_memory(total)
        if accumulate_into or is_seen:
            self._storage.settle()
        if accumulate_into:
            torch._foreach_add_(accumulate_into, accumulate_from)
            self._totals.drop()  # gradients live elsewhere: this would be a second copy of them
        else:
            self._totals.keep_only_if_used_by(total)


def _keep_sum(frame: Frame) -> None:
    frame.kept += (frame.total,)


def _let_go(frame: Frame) -> None:
    frame.kept = ()  # it goes back to the compute lane


def _scale(divisor: float, frame: Frame) -> None:
    frame.total.div_(divisor)


def _call(hook: ReduceHook, frame: Frame) -> None:
    hook(frame.total)


def run_hooks(parameter: Tensor) -> None:
    """Run the post-accumulate hooks of a parameter whose gradient is in place."""
    for hook in tuple((getattr(parameter, _HOOKS, None) or {}).values()):
        hook(parameter)
