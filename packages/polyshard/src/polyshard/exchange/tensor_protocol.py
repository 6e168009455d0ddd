"""FSDP2's tensor-subclass protocol on the engine's seams.

A parameter whose tensor class defines ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` decides
itself what travels and what the unsharded parameter is (torchao's quantized tensors do). Such
parameters form groups of their own. What the two methods take and return is found out once, while
the group is prepared, from the local shard alone: the sizes go into the plan that ranks compare,
and a later gather that does not match them is an error before anything is sent. Shards are padded
here, so the tensor class need not know about uneven ones.

Since torch 2.15 a class may say that what arrived is not needed once it was given the outputs.

Source of the protocol: ``torch.distributed.fsdp``, ``fully_shard`` (torch 2.11 to 2.15).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from polyshard._torch.private import has_fsdp_protocol, local_tensor, preserve_version
from polyshard.composition.roles import GATHER_CODEC, STORAGE, Contributions, Role
from polyshard.errors import ConflictError, ModuleError, PluginError, UnsupportedError
from polyshard.exchange.freshness import differs
from polyshard.params.parameter import ShardedParameter, Source
from polyshard.params.sharded import Shards
from polyshard.plugins.builtin import DeviceStorage
from polyshard.policies import MixedPrecisionPolicy
from polyshard.seams import GroupInfo
from polyshard.sharding.layout import ParameterLayout, align
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport.base import Extents, GatherPiece, Pending, Transport

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
        raise ModuleError(
            f"'{fqn}' is a {kind} that lacks {missing[0]}; FSDP2's protocol needs both {PRE} and "
            f"{POST}."
        )
    if dim != 0:
        raise ModuleError(
            f"'{fqn}' is a {kind} with FSDP2's protocol: shard it on dim 0, not {dim}."
        )
    count = len(inspect.signature(getattr(value, PRE)).parameters)
    if count not in (1, 5):
        raise ModuleError(
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


class ProtocolShards(Shards):
    """Sharded parameters whose local tensors are of the user's class, each with its own memory."""

    def __init__(self, sources: Sequence[Source], layout: Any, roles: MeshRoles) -> None:
        """Cut every source with the operations of its own class."""
        self.layout = layout
        self.roles = roles
        self._rank = roles.shard_rank
        first = sources[0].value
        # Nothing rests here: it stands for the dtype and device of the group.
        self.buffer = torch.empty(0, dtype=first.dtype, device=first.device)
        self.storage = DeviceStorage()  # gradients stay where they are reduced
        self.storage.rest(self.buffer)
        self.is_vacant = self.buffer.is_meta
        self._strays = set()
        self.parameters = [
            ShardedParameter(source, self._rows(source.value, placed))
            for source, placed in zip(sources, layout.parameters, strict=True)
        ]
        self.registry = self._new_registry()
        self.registry.register()

    @torch.no_grad()
    def _rows(self, value: Tensor, placed: ParameterLayout) -> Tensor:
        start, stop = placed.bounds(self._rank)
        return value.narrow(0, start, stop - start).clone()

    def padded(self, index: int) -> Tensor:
        """The local tensor with as many rows as the first rank's."""
        placed = self.layout.parameters[index]
        local = local_tensor(cast("DTensor", self.parameters[index].parameter))
        rows = placed.chunk_shape[0]
        if local.shape[0] == rows:
            return local
        padded = local.new_zeros(placed.chunk_shape)
        if local.shape[0]:
            padded.narrow(0, 0, local.shape[0]).copy_(local)
        return padded

    @override
    def have_moved(self) -> bool:
        """Unknown: such tensors need not have an address. Hooks tell of most changes."""
        return False

    @override
    def adopt_replaced(self) -> bool:
        """Take over parameter objects that replaced ours; memory is theirs anyway."""
        changed = self._adopt_registered()
        self.is_vacant = any(p.parameter.is_meta for p in self.parameters)
        return changed


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

    def __init__(self, shards: ProtocolShards, index: int, policy: MixedPrecisionPolicy) -> None:
        self._shards = shards
        self._index = index
        self._policy = policy
        self._sharded = shards.parameters[index]
        self._old_form = len(inspect.signature(getattr(shards.padded(index), PRE)).parameters) == 1
        self.wires: list[_Wire] = []
        self._metadata: Any = None
        self._inner: tuple[Tensor, ...] = ()
        self.leaf: nn.Parameter

    def inputs(self) -> Sequence[Tensor]:
        """What to send now; keeps the metadata for :meth:`finish`."""
        padded: Any = self._shards.padded(self._index)
        mesh = self._shards.roles.mesh
        if self._old_form:
            inputs, self._metadata = padded.fsdp_pre_all_gather(mesh)
        else:
            shape = torch.Size(self._sharded.info.shape)
            stride = torch.empty(shape, device="meta").stride()
            module = self._sharded.owners[0].module
            inputs, self._metadata = padded.fsdp_pre_all_gather(
                mesh, shape, stride, module, self._policy
            )
        found: Sequence[Tensor] = inputs
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
    def bind(self, offset: int, world_size: int, param_dtype: torch.dtype) -> int:
        """Lay out the payload and make the leaf from a trial run; returns the next offset."""
        for tensor in self.inputs():
            arrived = tensor.new_zeros(world_size * tensor.numel())
            alias = torch.empty(0, dtype=arrived.dtype, device=arrived.device)
            alias.set_(arrived.untyped_storage(), 0, arrived.shape, (1,))
            output = alias.view(-1, *tensor.shape[1:])
            shape, dtype = tensor.shape, tensor.dtype
            self.wires.append(_Wire(shape, dtype, offset, tensor.nbytes, arrived, output))
            offset += align(tensor.nbytes, 1)
        post = getattr(self._shards.padded(self._index), POST)
        outputs = tuple(w.output for w in self.wires)
        unsharded, self._inner = post(outputs, self._metadata, param_dtype)
        shape = torch.Size(self._sharded.info.shape)
        if unsharded.shape != shape:  # without the rows that padding added
            stride = torch.empty(shape, device="meta").stride()
            unsharded = torch.as_strided(unsharded, shape, stride, 0)
        trainable = self._sharded.parameter.requires_grad
        self.leaf = nn.Parameter(unsharded, requires_grad=trainable)
        self._releases = releases_outputs(self._sharded.info.fqn, self._shards.padded(self._index))
        return offset

    @torch.no_grad()
    def finish(self, received: Tensor, dtype: torch.dtype) -> None:
        """Hand over what arrived (``[W, payload_bytes]``); the leaf is complete afterwards."""
        for wire in self.wires:
            rows = received[:, wire.offset : wire.offset + wire.nbytes]
            world = received.shape[0]
            wire.arrived.view(torch.uint8).view(world, -1).copy_(rows)
        post = getattr(self._shards.padded(self._index), POST)
        with preserve_version(self.leaf):
            post(tuple(w.output for w in self.wires), self._metadata, dtype, out=self.leaf)
        if self._releases:  # allocated anew with the rest for the next gather
            for wire in self.wires:
                wire.arrived.untyped_storage().resize_(0)

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
        self.tensor = torch.empty(0)
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


class ProtocolGather:
    """Gathers what the tensor classes hand out, as one payload of bytes per rank."""

    def __init__(
        self,
        shards: ProtocolShards,
        policy: MixedPrecisionPolicy,
        dtype: torch.dtype,
        route: tuple[Transport, int],
    ) -> None:
        """Find out sizes, make the leaves, bind the transfer."""
        world = shards.layout.world_size
        self._dtype = dtype
        self._members = [_Parameter(shards, i, policy) for i in range(len(shards.parameters))]
        nbytes = 0
        for member in self._members:
            nbytes = member.bind(nbytes, world, dtype)
        self.payload_bytes = nbytes
        self.leaves = [member.leaf for member in self._members]
        storages: dict[int, torch.UntypedStorage] = {}
        for member in self._members:
            storages.update(member.storages())
        self.buffer = ProtocolBuffer(storages)
        device = shards.buffer.device
        self._payload = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._received = torch.zeros(world, nbytes, dtype=torch.uint8, device=device)
        transport, tag = route
        extents = Extents(nbytes, (nbytes,) * world)
        piece = GatherPiece(self._payload, self._received, extents)
        self._route = transport.gather_route([piece], tag)
        self.sent_bytes = self._route.sent_bytes
        self.received_bytes = self._route.received_bytes

    @torch.no_grad()
    def start(self, fetch: Callable[[], None]) -> Pending:
        """Ask every parameter what to send, and send it."""
        fetch()
        for part, tensor in self._outgoing():
            part.copy_(tensor)
        return self._route.start()

    def _outgoing(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of the payload, and the bytes that belong there now."""
        for member in self._members:
            for wire, tensor in zip(member.wires, member.inputs(), strict=True):
                part = self._payload[wire.offset : wire.offset + wire.nbytes]
                yield part, tensor.contiguous().view(-1).view(torch.uint8)

    @torch.no_grad()
    def differs(self, fetch: Callable[[], None]) -> Tensor:
        """Ask again what to send, and compare it with what was sent."""
        fetch()
        return differs(self._outgoing())

    def finish(self) -> None:
        """Give every parameter what arrived for it."""
        for member in self._members:
            member.finish(self._received, self._dtype)


def refuse_claims(contributions: Contributions, group: GroupInfo) -> None:
    """Refuse plugins that want what the tensor class decides.

    Raises:
        ConflictError: naming the roles, the group and its parameters.
    """
    decided: tuple[Role[Any], ...] = (GATHER_CODEC, STORAGE)
    claimed = [
        f"{role.name} '{contributions[role].name}'"
        for role in decided
        if type(contributions[role]) is not role.engine
    ]
    if claimed:
        names = ", ".join(p.fqn for p in group.parameters)
        raise ConflictError(
            f"the tensors of group '{group.name}' ({names}) bring FSDP2's all-gather protocol, and "
            f"a plugin claims its {' and '.join(claimed)}. Leave them to one of the two: "
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
