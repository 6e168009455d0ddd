"""What a group needs during a step, made when it is first used and after conversions."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from torch import nn

from polyshard.block import Block
from polyshard.buffers import Buffer, new_buffer
from polyshard.fit import fitting
from polyshard.freshness import Turn
from polyshard.gather import CodecGather, GatherPath, Line, NativeGather
from polyshard.layout import GroupLayout
from polyshard.mesh import MeshRoles
from polyshard.onion import Onion
from polyshard.pages import PagePool
from polyshard.parameter import Registry
from polyshard.plan import Dtypes
from polyshard.policies import MixedPrecisionPolicy
from polyshard.protocol import ProtocolGather, ProtocolShards
from polyshard.reduction import Reducer
from polyshard.seams import BoundGatherCodec, BoundReduceCodec, Contributions, GroupInfo
from polyshard.shards import Shards
from polyshard.transport import Transport
from polyshard.unsharded import Unsharded


@dataclass
class Runtime:
    """The unsharded side (memory, leaves, how they are filled), and the way back."""

    buffer: Buffer
    leaves: list[nn.Parameter]
    path: GatherPath
    reducer: Reducer
    registry: Registry
    dtypes: Dtypes
    block: Block | None = None


@dataclass(frozen=True)
class Parts:
    """What a runtime is built from; all of it is settled by the plan."""

    info: GroupInfo
    shards: Shards
    roles: MeshRoles
    policy: MixedPrecisionPolicy
    contributions: Contributions
    transport: Transport
    onion: Onion
    pool: PagePool | None
    block_size: int | None
    turn: Turn


def bind_reduce_codec(
    contributions: Contributions, info: GroupInfo, layout: GroupLayout
) -> BoundReduceCodec | None:
    """The reduce codec of a group as it is now.

    Raises:
        PluginError: when what the codec makes lacks members of its seam.
    """
    codec = contributions.reduce_codec
    return fitting(codec.bind(info, layout), BoundReduceCodec, codec, "bind")


def build_runtime(parts: Parts, dtypes: Dtypes) -> Runtime:
    """Bind every transfer of a group to memory. Leaves the unsharded side freed."""
    # Ranks agree on names, so they agree on tags without a word.
    tag = zlib.crc32(f"{parts.roles.describe()} {parts.info.name}".encode()) >> 2
    line = Line(parts.transport, tag, parts.roles.shard_rank)
    buffer, leaves, path = _unsharded_side(parts, dtypes, line)
    block = None if parts.block_size is None else _block(parts, parts.block_size, buffer, tag)
    buffer.release()
    reduce_codec = bind_reduce_codec(parts.contributions, parts.info, parts.shards.layout)
    reducer = Reducer(parts.shards, dtypes.reduce, parts.roles, line, reduce_codec, parts.pool)
    owners = (p.owners for p in parts.shards.parameters)
    registry = Registry(zip(owners, leaves, strict=True))
    return Runtime(buffer, leaves, path, reducer, registry, dtypes, block)


def _block(parts: Parts, size: int, buffer: Buffer, tag: int) -> Block:
    whole = buffer.tensor
    held = new_buffer(whole.numel() // size, whole.dtype, whole.device, parts.pool)
    held.acquire()
    return Block(held, whole, parts.transport.block(size), tag)


def _unsharded_side(
    parts: Parts, dtypes: Dtypes, line: Line
) -> tuple[Buffer, list[nn.Parameter], GatherPath]:
    shards = parts.shards
    if isinstance(shards, ProtocolShards):
        gather = ProtocolGather(shards, parts.policy, dtypes.param, (line.transport, line.tag))
        return gather.buffer, gather.leaves, gather
    gathering = parts.contributions.gather_codec
    bound = gathering.bind(parts.info, shards.layout)
    codec = fitting(bound, BoundGatherCodec, gathering, "bind")
    serve = getattr(shards.storage, "serve_codec", None)
    if serve is not None:
        serve(codec is not None)
    unsharded = Unsharded(
        shards,
        dtypes.param,
        parts.info.device,
        parts.pool,
        parts.onion,
        parts.block_size,
        is_decoded=codec is not None,
    )
    path: GatherPath = (
        NativeGather(unsharded, line)
        if codec is None
        else CodecGather(codec, unsharded, line, parts.turn)
    )
    return unsharded.buffer, unsharded.leaves, path
