"""FSDP2's tensor-subclass protocol on the engine's seams.

A parameter whose tensor class defines ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` decides
itself what travels and what the unsharded parameter is (torchao's quantized tensors do). Such
parameters form groups of their own. What the two methods take and return is found out once, while
the group is prepared, from the local shard alone: the sizes go into the plan that ranks compare,
and a later gather that does not match them is an error before anything is sent. Shards are padded
here, so the tensor class need not know about uneven ones.

The methods may also be put on the local tensor of a sharded parameter that is a plain one. That is
seen when the group is prepared; the other parameters of the group travel along as they are.
Since torch 2.15 a class may say that what arrived is not needed once it was given the outputs.

Source of the protocol: ``torch.distributed.fsdp``, ``fully_shard`` (torch 2.11 to 2.15).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from polyshard._torch.private import has_fsdp_protocol, preserve_version
from polyshard.errors import (
    ConflictError,
    ModuleError,
    PluginError,
    ProtocolError,
    UnsupportedError,
)
from polyshard.params.parameter import Source, note_origin
from polyshard.params.protocol_shards import ProtocolShards
from polyshard.params.sharded import Shards
from polyshard.plugins.contributions import GATHER_CODEC, LANDING, STORAGE, Contributions, Role
from polyshard.plugins.seams import GroupInfo
from polyshard.plugins.transforms import TransformStack
from polyshard.policies import MixedPrecisionPolicy
from polyshard.program.freshness import differs
from polyshard.program.ops import Frame, Memory, Op
from polyshard.program.unshard import Gather, ShardAxis
from polyshard.sharding.layout import align
from polyshard.transport.base import Extents, GatherPiece

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


def check_protocol(fqn: str, value: Tensor, dim: int | None) -> None:
    """Refuse half a protocol, and what it cannot express.

    Raises:
        ModuleError: naming the parameter and the tensor class.
    """
    kind = type(value).__name__
    missing = [name for name in (PRE, POST) if not hasattr(value, name)]
    if missing:
        raise ProtocolError(
            f"'{fqn}' is a {kind} that lacks {missing[0]}; FSDP2's protocol needs both {PRE} and "
            f"{POST}."
        )
    if dim != 0:
        raise ModuleError(
            f"'{fqn}' is a {kind} with FSDP2's protocol: shard it on dim 0, not {dim}."
        )
    count = len(inspect.signature(getattr(value, PRE)).parameters)
    if count not in (1, 5):
        raise ProtocolError(
            f"'{fqn}': {kind}.{PRE} takes {count} arguments; FSDP2's protocol has (mesh) or (mesh, "
            "outer_size, outer_stride, module, mp_policy)."
        )


def releases_outputs(fqn: str, value: Tensor) -> bool:
    """Whether what arrived may be freed as soon as the unsharded parameter was made of it.

    Raises:
        ModuleError: for an answer that is neither ``True`` nor ``False``.
    """
    ask: Callable[[], object] | None = getattr(value, RELEASE, None)
    answer = False if ask is None else ask()
    if not isinstance(answer, bool):
        raise ModuleError(
            f"'{fqn}': {type(value).__name__}.{RELEASE} returned {answer!r}; it must be a bool."
        )
    return answer


def refuse_claims(contributions: Contributions, group: GroupInfo) -> None:
    """Refuse plugins that want what the tensor class decides.

    Raises:
        ConflictError: naming the roles, the group and its parameters.
    """
    decided: tuple[Role[Any], ...] = (GATHER_CODEC, LANDING, STORAGE)
    claimed = [
        f"{role.name} '{contributions[role].name}'"
        for role in decided
        if type(contributions[role]) is not role.engine
    ]
    if claimed:
        names = ", ".join(p.fqn for p in group.parameters)
        raise ConflictError(
            f"the tensors of group '{group.identity}' ({names}) bring FSDP2's all-gather protocol, "
            f"and a plugin claims its {' and '.join(claimed)}. Leave them to one of the two: "
            "drop the plugin for this unit, or have it return None for this group."
        )


def refuse_block(block_size: int | None, group: GroupInfo) -> None:
    """Refuse blocks: what such a tensor becomes is its class's own business.

    Raises:
        UnsupportedError: naming the parameters.
    """
    if block_size is not None:
        names = ", ".join(p.fqn for p in group.parameters)
        raise UnsupportedError(
            f"reshard_after_forward={block_size} is not supported for tensors that bring FSDP2's "
            f"all-gather protocol ({names}). Pass True or False for this unit."
        )


def uses_protocol(sources: Sequence[Source]) -> bool:
    """Whether a group's parameters bring FSDP2's protocol (all do, or none)."""
    return has_fsdp_protocol(sources[0].value)


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


class _Member(ABC):
    """One parameter of the group: what it sends, and what becomes of what arrives."""

    releases = False
    """Whether what arrived may be freed as soon as the unsharded parameter was made of it."""
    leaf: nn.Parameter

    def __init__(self, shards: Shards, index: int, dtype: torch.dtype) -> None:
        """``dtype`` is that of compute."""
        self._shards, self._index, self._dtype = shards, index, dtype
        self._sharded, self._placed = shards.parameters[index], shards.layout.parameters[index]
        self._shape = torch.Size(self._placed.shape)
        self.wires: list[_Wire] = []
        self._metadata: Any = None
        self._inner: tuple[Tensor, ...] = ()
        self._first: Tensor | None = None

    @abstractmethod
    def pre(self) -> tuple[Sequence[Tensor], Any]:
        """What travels, and what :meth:`post` is to know."""

    @abstractmethod
    def post(self, outputs: Sequence[Tensor], metadata: Any, out: Tensor | None = None) -> Any:
        """The unsharded tensor and what it needs beside ``outputs``; nothing where ``out`` is."""

    def inputs(self) -> Sequence[Tensor]:
        """What to send now; keeps the metadata for :meth:`finish`."""
        inputs, self._metadata = self.pre()
        if self.wires:
            planned = [(w.shape, w.dtype) for w in self.wires]
            found = [(t.shape, t.dtype) for t in inputs]
            if planned != found:
                raise PluginError(
                    f"'{self._sharded.info.fqn}': {PRE} returned {found}, planned were {planned}. "
                    "Shapes and dtypes must be the same in every step and on every rank."
                )
        return inputs

    @torch.no_grad()
    def bind(self, offset: int, world_size: int, transforms: TransformStack) -> int:
        """Lay out the payload and make the leaf from a trial run; returns the next offset."""
        for tensor in self.inputs():
            arrived = tensor.new_zeros(world_size * tensor.numel())
            alias = torch.empty(0, dtype=arrived.dtype, device=arrived.device)
            alias.set_(arrived.untyped_storage(), 0, arrived.shape, (1,))
            output = alias.view(-1, *tensor.shape[1:])
            shape, dtype = tensor.shape, tensor.dtype
            self.wires.append(_Wire(shape, dtype, offset, tensor.nbytes, arrived, output))
            offset += align(tensor.nbytes, 1)
        unsharded, self._inner = self.post(self._outputs(), self._metadata)
        if unsharded.shape != self._shape:  # without the rows that padding added
            self._first = unsharded if type(unsharded) is Tensor else None
            stride = torch.empty(self._shape, device="meta").stride()
            unsharded = torch.as_strided(unsharded, self._shape, stride, 0)
        info, extensions = self._sharded.info, self._sharded.extensions
        unsharded = transforms.unflatten(unsharded, extensions, info)
        trainable = self._sharded.parameter.requires_grad
        self.leaf = nn.Parameter(unsharded, requires_grad=trainable)
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
                self.post(self._outputs(), self._metadata, self.leaf)
            else:
                self._fill_first(self._first)
        if self.releases:  # allocated anew with the rest for the next gather
            for wire in self.wires:
                wire.arrived.untyped_storage().resize_(0)

    def _fill_first(self, first: Tensor) -> None:
        """As FSDP2's first gather: without an ``out``, whose rows are fewer than those that arrive.

        A class that copies into ``out`` regardless fails there at its second gather, not before.
        """
        whole, _ = self.post(self._outputs(), self._metadata)
        if whole.data_ptr() != first.data_ptr():
            first.copy_(whole)
        self._first = None

    def storages(self) -> Iterator[torch.UntypedStorage]:
        """Everything to free while sharded."""
        for tensor in (*(wire.arrived for wire in self.wires), *self._inner):
            yield tensor.untyped_storage()


class _Asked(_Member):
    """A parameter whose tensor has the two methods, which are called as FSDP2 calls them."""

    def __init__(
        self,
        shards: Shards,
        index: int,
        dtype: torch.dtype,
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
    ) -> None:
        super().__init__(shards, index, dtype)
        self._mesh, self._policy = mesh, policy
        self._stride = torch.empty(self._shape, device="meta").stride()
        carrier = self._carrier()
        self._old_form = len(inspect.signature(getattr(carrier, PRE)).parameters) == 1
        self.releases = releases_outputs(self._sharded.info.fqn, carrier)

    def _carrier(self) -> Any:
        """What has the methods: the tensor of a class padded, else the one they were put on."""
        if isinstance(self._shards, ProtocolShards):
            return self._shards.padded(self._index)
        return self._shards.local(self._index)

    @override
    def pre(self) -> tuple[Sequence[Tensor], Any]:
        carrier = self._carrier()
        if self._old_form:
            return cast("tuple[Sequence[Tensor], Any]", carrier.fsdp_pre_all_gather(self._mesh))
        inputs, metadata = carrier.fsdp_pre_all_gather(
            self._mesh, self._shape, self._stride, self._sharded.owners[0].module, self._policy
        )
        return [self._padded(tensor) for tensor in inputs], metadata

    def _padded(self, sent: Tensor) -> Tensor:
        """As many rows as the first rank sends, where they are the local tensor's own."""
        shape, local = self._placed.chunk_shape, self._shards.local(self._index).shape
        if sent.shape != local or local == shape:
            return sent
        padded = sent.new_zeros(shape)
        padded[: local[0]].copy_(sent)
        return padded

    @override
    def post(self, outputs: Sequence[Tensor], metadata: Any, out: Tensor | None = None) -> Any:
        method, into = getattr(self._carrier(), POST), {} if out is None else {"out": out}
        return method(tuple(outputs), metadata, self._dtype, **into)


class _Plain(_Member):
    """A plain parameter beside others that have the methods: what the engine does by itself."""

    @override
    def pre(self) -> tuple[Sequence[Tensor], Any]:
        """The padded chunk, in the dtype of compute."""
        local = self._shards.local(self._index)
        chunk = local.new_zeros(self._placed.chunk_shape, dtype=self._dtype)
        chunk[tuple(slice(n) for n in local.shape)].copy_(local)
        return (chunk,), None

    @override
    def post(self, outputs: Sequence[Tensor], metadata: Any, out: Tensor | None = None) -> Any:
        """Chunks of dim 0, one behind the other, are the parameter; others are put together."""
        del metadata
        (stacked,), placed = outputs, self._placed
        if not placed.dim:
            return stacked, ()
        chunks = stacked.view(placed.world_size, *placed.chunk_shape).unbind(0)
        whole = torch.cat(chunks, placed.dim).narrow(placed.dim, 0, placed.shape[placed.dim])
        if out is not None:
            return out.copy_(whole)
        whole = whole.contiguous()
        return whole, (whole,)


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
        self,
        shards: Shards,
        axis: ShardAxis,
        transforms: TransformStack,
        policy: MixedPrecisionPolicy,
        dtype: torch.dtype,
    ) -> None:
        """Find out sizes, make the leaves, bind the transfer; ``dtype`` is that of compute."""
        world, device = shards.layout.world_size, axis.roles.device
        for index in shards.speaking:
            placed = shards.layout.parameters[index]
            check_protocol(placed.name, shards.local(index), placed.dim)
        self._members: list[_Member] = []
        nbytes = 0
        for index in range(len(shards.parameters)):
            member: _Member = _Plain(shards, index, dtype)
            if isinstance(shards, ProtocolShards) or index in shards.speaking:
                member = _Asked(shards, index, dtype, axis.roles.shard_mesh, policy)
            nbytes = member.bind(nbytes, world, transforms)
            self._members.append(member)
        self.payload_bytes = nbytes
        self.leaves = [member.leaf for member in self._members]
        for leaf, sharded in zip(self.leaves, shards.parameters, strict=True):
            note_origin(leaf, sharded)
        storages = (storage for member in self._members for storage in member.storages())
        self.buffer = ProtocolBuffer({storage._cdata: storage for storage in storages})
        self._payload = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._received = torch.zeros(world, nbytes, dtype=torch.uint8, device=device)
        self.kept_bytes = self._payload.nbytes + self._received.nbytes
        extents = Extents(nbytes, (nbytes,) * world)
        self.route = axis.gather_route([GatherPiece(self._payload, self._received, extents)])

    @override
    def scratch(self) -> None:
        return None

    @override
    def before(self, fetch: Op | None) -> list[Op]:
        reads = (Memory.SHARD, Memory.PAYLOADS)
        ask = Op("ask", self._ask, reads=reads, writes=(Memory.PAYLOAD,))
        return [ask] if fetch is None else [fetch, ask]

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
