"""What a group needs during a step, made when it is first used and after conversions."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn

from polyshard._torch.newer import set_grad_dtype
from polyshard.errors import UnsupportedError
from polyshard.group.dtypes import Dtypes, GradientDtypes
from polyshard.memory.buffers import Buffer, new_buffer
from polyshard.memory.pages import PagePool
from polyshard.params.parameter import Registry, Told
from polyshard.params.protocol_shards import ProtocolShards
from polyshard.params.sharded import Shards
from polyshard.params.unsharded import Unsharded
from polyshard.plugins.contributions import (
    GATHER_CODEC,
    LANDING,
    REDUCE_CODEC,
    STORAGE,
    Contributions,
)
from polyshard.plugins.seams import BoundReduceCodec, GroupInfo, ShardStorage, overrides
from polyshard.plugins.transforms import TransformStack
from polyshard.policies import MixedPrecisionPolicy
from polyshard.program.accumulation import Accumulation
from polyshard.program.landing import Landing, Placing
from polyshard.program.meter import Meter
from polyshard.program.ops import Program
from polyshard.program.owned import Axes, Owned
from polyshard.program.reduce import Key, Reducer
from polyshard.program.tensor_protocol import ProtocolGather, refuse_block, refuse_claims
from polyshard.program.unshard import (
    Block,
    CodecGather,
    Gather,
    NativeGather,
    ShardAxis,
    unshard_program,
)
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport import Transport
from polyshard.transport.base import Turn


@dataclass(frozen=True)
class Parts:
    """What a generation is built from, all settled by the plan."""

    info: GroupInfo
    shards: Shards
    roles: MeshRoles
    policy: MixedPrecisionPolicy
    contributions: Contributions
    transport: Transport
    transforms: TransformStack
    pool: PagePool | None
    block_size: int | None
    waiting: Accumulation
    """Gradients of backwards before this generation was made."""
    turn: Turn
    dtypes: Dtypes
    gradients: GradientDtypes
    keeps_memory: bool
    """Whether unsharded memory, once there, stays at its addresses."""
    meter: Meter


def landing_of(
    parts: Parts,
    axis: ShardAxis,
    placing: Placing,
    codec: BoundReduceCodec | None,
) -> Landing | None:
    """What brings gradients of the group to their owners; ``None`` where they land on shards.

    What owners of those may gather them with is shown to the plugin all the same.

    Raises:
        UnsupportedError: where another part of the group needs them in rows.
    """
    contributions, seam = parts.contributions, parts.contributions[LANDING]
    shown = [p.parameter for p in parts.shards.parameters]
    contributions.call(seam, seam.show, parts.info, shown)
    layout = parts.shards.layout
    if not layout.with_owner:
        return None
    _check(parts, codec)
    axes = Axes.of(axis, parts.dtypes.reduce)
    owned = {
        i: Owned(i, layout.owners[i] or 0, parts.shards.parameters[i], layout.parameters[i], axes)
        for i in layout.with_owner
    }
    contributions.call(seam, seam.hold, parts.info, tuple(owned.values()))
    if not layout.lands:
        return None
    return Landing(owned, parts.waiting, placing, parts.pool, seam.landed)


def _check(parts: Parts, codec: BoundReduceCodec | None) -> None:
    shards, contributions = parts.shards, parts.contributions
    layout, world = shards.layout, parts.roles.shard_size
    infos = {i: shards.parameters[i].info for i in layout.with_owner}
    kept = [p.fqn for i, p in infos.items() if layout.parameters[i].dim is None and world > 1]
    changed = {i: p.fqn for i, p in infos.items() if p.part_shape is None}
    divided = [p.fqn for p in infos.values() if p.part_shape != p.shape]
    problem = ""
    if kept:
        problem = f"every rank holds {kept} whole"
    elif changed:
        layers = parts.transforms.layers_of(shards.parameters[next(iter(changed))].extensions)
        names = list(changed.values())
        problem = f"plugins {', '.join(layers)} change {names} before they are sharded"
    elif divided and not contributions[LANDING].takes_parts:
        problem = f"other axes of their meshes divide {divided}, and it takes whole matrices alone"
    elif codec is not None and layout.lands:
        plugin = contributions.plugin_of(contributions[REDUCE_CODEC])
        problem = f"{plugin} encodes the gradients of all ranks in rows"
    elif overrides(shards.storage.place_gradient, ShardStorage.place_gradient):
        plugin = contributions.plugin_of(contributions[STORAGE])
        problem = f"{plugin} moves gradients to where shards rest, in rows"
    if problem:
        plugin = contributions.plugin_of(contributions[LANDING])
        chosen = [p.fqn for p in infos.values()]
        raise UnsupportedError(
            f"{plugin}: gradients of {chosen} of group '{parts.info.identity}' are to land whole "
            f"on owners, but {problem}. Leave these parameters out of one of the two."
        )


@dataclass
class Generation:
    """What is bound to a group's memory, and its programs, until parameters change hands."""

    buffer: Buffer
    leaves: list[nn.Parameter]
    gather: Gather
    """The way from all shards."""
    unshard: Program
    reducer: Reducer
    registry: Registry
    dtypes: Dtypes
    gradients: GradientDtypes
    wire: torch.dtype
    """In which gradients of one backward travel; sums of several do in the reduce dtype."""
    unsharded: Unsharded | None
    """What owns buffer and leaves, unless a tensor class does."""
    block: Block | None = None
    unshard_from_block: Program | None = None
    reductions: dict[Key, Program] = field(default_factory=dict)
    """Programs of the reducer under the settings of the group. Not held by the reducer itself,
    which they refer to: memory is to go with the last reference."""
    trained: list[bool] = field(init=False)
    """What leaves were told to require, so that what users tell them is noticed."""

    def __post_init__(self) -> None:
        """Take it from the leaves."""
        self.trained = [leaf.requires_grad for leaf in self.leaves]

    def let_go(self) -> None:
        """Drop what is bound to shards that were replaced, which would keep their memory.

        Kept are the parts that the next generation uses too, and those that reduce gradients of
        earlier forwards.
        """
        for name in ("gather", "unshard"):
            self.__dict__.pop(name, None)  # nothing to do where it was replaced again
        self.block = self.unshard_from_block = None

    @property
    def gathers(self) -> tuple[Program, ...]:
        """The programs that gather: from all shards, and from a block if there is one."""
        block = self.unshard_from_block
        return (self.unshard,) if block is None else (self.unshard, block)


def build_generation(parts: Parts, last: Generation | None) -> Generation:
    """Bind every transfer of a group to memory. Leaves the unsharded side freed, if it may be.

    Args:
        parts: what it is built from.
        last: the generation until now; its memory and leaves are used again where they suit.
    """
    dtypes, contributions, shards = parts.dtypes, parts.contributions, parts.shards
    shards.turn = parts.turn
    # Ranks agree on names, so they agree on tags without a word.
    tag = zlib.crc32(f"{parts.roles.describe()} {parts.info.identity}".encode()) >> 2
    axis = ShardAxis(parts.transport, tag, parts.roles)
    unsharded, gather = _unsharded_side(parts, axis, last)
    side: Unsharded | ProtocolGather = unsharded or cast("ProtocolGather", gather)
    buffer, leaves = side.buffer, side.leaves
    _tell_leaves(parts, leaves)
    registry = Registry(zip((p.owners for p in shards.parameters), leaves, strict=True))
    block = None if parts.block_size is None else _block(parts, parts.block_size, buffer, tag)
    if not parts.keeps_memory:
        buffer.release()
    reduce_codec = contributions.bound(REDUCE_CODEC, parts.info, shards.layout)
    placing = Placing(parts.gradients.placed, dtypes.orig, dtypes.reduce)
    reducer = Reducer(
        shards,
        axis,
        reduce_codec,
        contributions,
        waiting=parts.waiting,
        placing=placing,
        meter=parts.meter,
        landing=landing_of(parts, axis, placing, reduce_codec),
        pool=parts.pool,
    )
    fetch = parts.meter.fetching(shards)
    return Generation(
        buffer,
        leaves,
        gather,
        unshard_program(gather, buffer, shards, registry, fetch),
        reducer,
        registry,
        dtypes,
        parts.gradients,
        parts.gradients.wire(dtypes),
        unsharded,
        block,
        None if block is None else unshard_program(block, buffer, shards, registry, fetch),
    )


def _tell_leaves(parts: Parts, leaves: Sequence[nn.Parameter]) -> None:
    """Have leaves take gradients of the dtypes that their sharded parameters ask for."""
    for sharded, leaf, kept in zip(
        parts.shards.parameters, leaves, parts.gradients.kept, strict=True
    ):
        if sharded.told is not None and Told.by(leaf) != Told(kept):
            set_grad_dtype(leaf, kept)


def _block(parts: Parts, size: int, buffer: Buffer, tag: int) -> Block:
    whole = buffer.tensor
    held = new_buffer(whole.numel() // size, whole.dtype, whole.device, parts.pool)
    held.acquire()
    return Block(held, whole, parts.transport.block(size), tag)


def _unsharded_side(
    parts: Parts, axis: ShardAxis, last: Generation | None
) -> tuple[Unsharded | None, Gather]:
    shards, contributions = parts.shards, parts.contributions
    if shards.speaking:  # the plan was made before anybody knew
        refuse_claims(contributions, parts.info)
        refuse_block(parts.block_size, parts.info)
    if shards.speaking or isinstance(shards, ProtocolShards):
        dtype = parts.dtypes.param
        return None, ProtocolGather(shards, axis, parts.transforms, parts.policy, dtype)
    codec = contributions.bound(GATHER_CODEC, parts.info, shards.layout)
    shards.storage.serve_codec(codec is not None)
    crosses, device = codec is not None, parts.info.device
    contributions.check_view(shards.storage, shards.buffer, device, may_cross=crosses)
    unsharded = _memory(parts, last, is_decoded=codec is not None)
    if codec is None:
        return unsharded, NativeGather(unsharded, axis)
    plugin = contributions.plugin_of(contributions[GATHER_CODEC])
    return unsharded, CodecGather(codec, unsharded, axis, parts.turn, plugin)


def _memory(parts: Parts, last: Generation | None, *, is_decoded: bool) -> Unsharded:
    old = None if last is None else last.unsharded
    dtype, pool, block_size = parts.dtypes.param, parts.pool, parts.block_size
    if old is not None and old.serves(dtype, pool, block_size, is_decoded=is_decoded):
        old.follow()
        return old
    return Unsharded(
        parts.shards,
        dtype,
        parts.info.device,
        pool,
        parts.transforms,
        block_size,
        is_decoded=is_decoded,
    )
