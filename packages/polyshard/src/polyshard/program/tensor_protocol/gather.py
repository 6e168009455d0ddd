"""The gather of a group whose tensors decide themselves what travels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from polyshard._torch.private import preserve_version
from polyshard.errors import (
    PluginError,
)
from polyshard.params.protocol_shards import ProtocolShards
from polyshard.params.sharded import Shards
from polyshard.program.freshness import differs
from polyshard.program.ops import Frame, Memory, Op
from polyshard.program.tensor_protocol.checks import PRE, check_protocol
from polyshard.program.tensor_protocol.sides import ProtocolParts, Silent, Spoken
from polyshard.program.unshard import Gather, ShardAxis
from polyshard.sharding.layout import align
from polyshard.transport.base import Extents, GatherPiece


@dataclass
class _Wire:
    """One tensor that ``fsdp_pre_all_gather`` returned: where it travels, where it arrives.

    ``arrived`` is written to, ``output`` handed out (all ranks' tensors, stacked along dim 0). They
    share memory but not a version counter: the unsharded parameter may alias ``output``, and
    refilling it must not look like a change to autograd.
    """

    shape: torch.Size
    dtype: torch.dtype
    offset: int
    nbytes: int
    arrived: Tensor
    output: Tensor


class _Parameter:
    """One parameter's side of the protocol."""

    def __init__(self, shards: Shards, index: int, parts: ProtocolParts) -> None:
        self._sharded = shards.parameters[index]
        self._shape = torch.Size(shards.layout.parameters[index].shape)
        self._parts = parts
        speaks = isinstance(shards, ProtocolShards) or index in shards.speaking
        self._side = (Spoken if speaks else Silent)(shards, index, parts)
        self.wires: list[_Wire] = []
        self._metadata: Any = None
        self._inner: tuple[Tensor, ...] = ()
        self._first: Tensor | None = None
        self.leaf: nn.Parameter

    def inputs(self) -> Sequence[Tensor]:
        """What to send now; keeps the metadata for :meth:`finish`."""
        found, self._metadata = self._side.pre()
        if self.wires:
            self._check(found)
        return found

    def _check(self, inputs: Sequence[Tensor]) -> None:
        planned = [(w.shape, w.dtype) for w in self.wires]
        found = [(t.shape, t.dtype) for t in inputs]
        if planned != found:
            raise PluginError(
                f"'{self._sharded.info.fqn}': {PRE} returned {found}, planned were {planned}. "
                "Shapes and dtypes must be the same in every step and on every rank."
            )

    @torch.no_grad()
    def bind(self, offset: int, world_size: int) -> int:
        """Lay out the payload and make the leaf from a trial run; returns the next offset."""
        for tensor in self.inputs():
            arrived = tensor.new_zeros(world_size * tensor.numel())
            alias = torch.empty(0, dtype=arrived.dtype, device=arrived.device)
            alias.set_(arrived.untyped_storage(), 0, arrived.shape, (1,))
            output = alias.view(-1, *tensor.shape[1:])
            shape, dtype = tensor.shape, tensor.dtype
            self.wires.append(_Wire(shape, dtype, offset, tensor.nbytes, arrived, output))
            offset += align(tensor.nbytes, 1)
        unsharded, self._inner = self._side.post(self._outputs(), self._metadata)
        if unsharded.shape != self._shape:  # without the rows that padding added
            self._first = unsharded if type(unsharded) is Tensor else None
            stride = torch.empty(self._shape, device="meta").stride()
            unsharded = torch.as_strided(unsharded, self._shape, stride, 0)
        info, extensions = self._sharded.info, self._sharded.extensions
        unsharded = self._parts.transforms.rebuild(unsharded, extensions, info)
        trainable = self._sharded.parameter.requires_grad
        self.leaf = nn.Parameter(unsharded, requires_grad=trainable)
        self._releases = self._side.releases(info.fqn)
        return offset

    def _outputs(self) -> list[Tensor]:
        return [wire.output for wire in self.wires]

    @torch.no_grad()
    def finish(self, received: Tensor) -> None:
        """Hand over what arrived (``[W, payload_bytes]``); the leaf is complete afterwards."""
        for wire in self.wires:
            rows = received[:, wire.offset : wire.offset + wire.nbytes]
            world = received.shape[0]
            wire.arrived.view(torch.uint8).view(world, -1).copy_(rows)
        with preserve_version(self.leaf):
            if self._first is None:
                self._side.post(self._outputs(), self._metadata, self.leaf)
            else:
                self._fill_first(self._first)
        if self._releases:  # allocated anew with the rest for the next gather
            for wire in self.wires:
                wire.arrived.untyped_storage().resize_(0)

    def _fill_first(self, first: Tensor) -> None:
        """As FSDP2's first gather: without an ``out``, whose rows are fewer than those that arrive.

        A class that copies into ``out`` regardless fails there at its second gather, not before.
        """
        whole, _ = self._side.post(self._outputs(), self._metadata)
        if whole.data_ptr() != first.data_ptr():
            first.copy_(whole)
        self._first = None

    def storages(self) -> dict[int, torch.UntypedStorage]:
        """Everything to free while sharded, by identity."""
        tensors = (*(w.arrived for w in self.wires), *self._inner)
        found = (t.untyped_storage() for t in tensors)
        return {s._cdata: s for s in found}


class ProtocolBuffer:
    """The memory of a group's unsharded parameters and of what arrived for them."""

    def __init__(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """All of it is allocated now."""
        self._storages = [(s, s.nbytes()) for s in storages.values()]
        self.tensor = torch.empty(0, device="cpu")
        self.nbytes = sum(n for _, n in self._storages)

    def acquire(self) -> None:
        """Allocate what was freed."""
        for storage, nbytes in self._storages:
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)

    def release(self) -> None:
        """Free, keeping every alias."""
        for storage, _ in self._storages:
            storage.resize_(0)


class ProtocolGather(Gather):
    """Gathers what the tensor classes hand out, as one payload of bytes per rank."""

    sources, targets = (Memory.PAYLOAD,), (Memory.PAYLOADS,)

    def __init__(
        self, shards: Shards, parts: ProtocolParts, axis: ShardAxis, device: torch.device
    ) -> None:
        """Find out sizes, make the leaves, bind the transfer."""
        world = shards.layout.world_size
        for index in shards.speaking:
            placed = shards.layout.parameters[index]
            check_protocol(placed.name, shards.local(index), placed.dim)
        self._members = [_Parameter(shards, i, parts) for i in range(len(shards.parameters))]
        nbytes = 0
        for member in self._members:
            nbytes = member.bind(nbytes, world)
        self.payload_bytes = nbytes
        self.leaves = [member.leaf for member in self._members]
        storages: dict[int, torch.UntypedStorage] = {}
        for member in self._members:
            storages.update(member.storages())
        self.buffer = ProtocolBuffer(storages)
        self._payload = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._received = torch.zeros(world, nbytes, dtype=torch.uint8, device=device)
        self.kept_bytes = self._payload.nbytes + self._received.nbytes
        extents = Extents(nbytes, (nbytes,) * world)
        self.route = axis.gather_route([GatherPiece(self._payload, self._received, extents)])

    @override
    def scratch(self) -> None:
        return None

    @override
    def before(self, fetch: Callable[[], None] | None) -> list[Op]:
        reads = (Memory.SHARD, Memory.PAYLOADS)
        ask = Op("ask", self._ask, reads=reads, writes=(Memory.PAYLOAD,))
        return [ask] if fetch is None else [self.fetching(fetch), ask]

    @torch.no_grad()
    def _ask(self, frame: Frame) -> None:
        """Ask every parameter what to send."""
        del frame
        for part, tensor in self._outgoing():
            part.copy_(tensor)

    def _outgoing(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of the payload, and the bytes that belong there now."""
        for member in self._members:
            for wire, tensor in zip(member.wires, member.inputs(), strict=True):
                part = self._payload[wire.offset : wire.offset + wire.nbytes]
                yield part, tensor.contiguous().view(-1).view(torch.uint8)

    @override
    @torch.no_grad()
    def differs(self, fetch: Callable[[], None]) -> Tensor:
        """Ask again what to send, and compare it with what was sent."""
        fetch()
        return differs(self._outgoing())

    @override
    def after(self) -> list[Op]:
        return [Op("post", self._post, reads=(Memory.PAYLOADS,), writes=(Memory.UNSHARDED,))]

    def _post(self, frame: Frame) -> None:
        """Give every parameter what arrived for it."""
        del frame
        for member in self._members:
            member.finish(self._received)
