"""What a group needs during a step, made when it is first used and after conversions."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import partial

from torch import nn

from polyshard.block import Block
from polyshard.bound import Binding
from polyshard.buffers import Buffer, new_buffer
from polyshard.gather import CodecGather, GatherPath, Line, NativeGather
from polyshard.mesh import MeshRoles
from polyshard.onion import Onion
from polyshard.pages import PagePool
from polyshard.parameter import Registry
from polyshard.plan import Dtypes
from polyshard.policies import MixedPrecisionPolicy
from polyshard.protocol import ProtocolGather, ProtocolShards
from polyshard.reduction import Reducer
from polyshard.seams import Contributions, GroupInfo
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


def build_runtime(parts: Parts, dtypes: Dtypes) -> Runtime:
    """Bind every transfer of a group to memory. Leaves the unsharded side freed."""
    # Ranks agree on names, so they agree on tags without a word.
    tag = zlib.crc32(f"{parts.roles.describe()} {parts.info.name}".encode()) >> 2
    line = Line(parts.transport, tag, parts.roles.shard_rank)
    binding = Binding(parts.contributions, parts.info.name)
    buffer, leaves, path = _unsharded_side(parts, dtypes, line, binding)
    block = None if parts.block_size is None else _block(parts, parts.block_size, buffer, tag)
    buffer.release()
    reduce_codec = binding.reduce_codec(parts.info, parts.shards.layout)
    check = partial(binding.check_placed, parts.shards.storage)
    reducer = Reducer(
        parts.shards, dtypes.reduce, parts.roles, line, reduce_codec, check, parts.pool
    )
    owners = (p.owners for p in parts.shards.parameters)
    registry = Registry(zip(owners, leaves, strict=True))
    return Runtime(buffer, leaves, path, reducer, registry, dtypes, block)


def _block(parts: Parts, size: int, buffer: Buffer, tag: int) -> Block:
    whole = buffer.tensor
    held = new_buffer(whole.numel() // size, whole.dtype, whole.device, parts.pool)
    held.acquire()
    return Block(held, whole, parts.transport.block(size), tag)


def _unsharded_side(
    parts: Parts, dtypes: Dtypes, line: Line, binding: Binding
) -> tuple[Buffer, list[nn.Parameter], GatherPath]:
    shards = parts.shards
    if isinstance(shards, ProtocolShards):
        gather = ProtocolGather(shards, parts.policy, dtypes.param, (line.transport, line.tag))
        return gather.buffer, gather.leaves, gather
    codec = binding.gather_codec(parts.info, shards.layout)
    serve = getattr(shards.storage, "serve_codec", None)
    if serve is not None:
        serve(codec is not None)
    crosses, device = codec is not None, parts.info.device
    binding.check_view(shards.storage, shards.buffer, device, may_cross=crosses)
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
        NativeGather(unsharded, line) if codec is None else CodecGather(codec, unsharded, line)
    )
    return unsharded.buffer, unsharded.leaves, path
