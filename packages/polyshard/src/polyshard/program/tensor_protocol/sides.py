"""One parameter of a group that speaks the protocol: its two methods, or what stands for them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from polyshard.params.protocol_shards import ProtocolShards
from polyshard.params.sharded import Shards
from polyshard.plugins.transforms import TransformStack
from polyshard.policies import MixedPrecisionPolicy
from polyshard.program.tensor_protocol.checks import POST, PRE, releases_outputs


@dataclass(frozen=True)
class ProtocolParts:
    """What a tensor is told when it is asked, and what becomes of its answer."""

    mesh: DeviceMesh
    policy: MixedPrecisionPolicy
    param_dtype: torch.dtype
    transforms: TransformStack


class Spoken:
    """The two methods of a tensor, asked as FSDP2 asks them."""

    def __init__(self, shards: Shards, index: int, parts: ProtocolParts) -> None:
        self._shards = shards
        self._index = index
        self._parts = parts
        self._shape = torch.Size(shards.layout.parameters[index].shape)
        self._stride = torch.empty(self._shape, device="meta").stride()
        self._old_form = len(inspect.signature(getattr(self._carrier(), PRE)).parameters) == 1

    def _carrier(self) -> Any:
        """What has the methods: the tensor of a class padded, else the one they were put on."""
        if isinstance(self._shards, ProtocolShards):
            return self._shards.padded(self._index)
        return self._shards.local(self._index)

    def pre(self) -> tuple[Sequence[Tensor], Any]:
        """What travels, and what :meth:`post` is to know."""
        carrier, parts = self._carrier(), self._parts
        if self._old_form:
            return cast("tuple[Sequence[Tensor], Any]", carrier.fsdp_pre_all_gather(parts.mesh))
        module = self._shards.parameters[self._index].owners[0].module
        inputs, metadata = carrier.fsdp_pre_all_gather(
            parts.mesh, self._shape, self._stride, module, parts.policy
        )
        return [self._padded(tensor) for tensor in inputs], metadata

    def _padded(self, sent: Tensor) -> Tensor:
        """As many rows as the first rank sends, where they are the local tensor's own."""
        shape = self._shards.layout.parameters[self._index].chunk_shape
        local = self._shards.local(self._index).shape
        if sent.shape != local or local == shape:
            return sent
        padded = sent.new_zeros(shape)
        padded[: local[0]].copy_(sent)
        return padded

    def post(self, outputs: Sequence[Tensor], metadata: Any, out: Tensor | None = None) -> Any:
        """The unsharded tensor and what it needs beside ``outputs``; nothing where ``out`` is."""
        method = getattr(self._carrier(), POST)
        if out is None:
            return method(tuple(outputs), metadata, self._parts.param_dtype)
        return method(tuple(outputs), metadata, self._parts.param_dtype, out=out)

    def releases(self, fqn: str) -> bool:
        """See :func:`releases_outputs`."""
        return releases_outputs(fqn, self._carrier())


class Silent:
    """A plain parameter beside others that have the methods: what the engine does by itself."""

    def __init__(self, shards: Shards, index: int, parts: ProtocolParts) -> None:
        self._shards = shards
        self._index = index
        self._dtype = parts.param_dtype
        self._placed = shards.layout.parameters[index]

    def pre(self) -> tuple[Sequence[Tensor], Any]:
        """The padded chunk, in the dtype of compute."""
        local = self._shards.local(self._index)
        chunk = local.new_zeros(self._placed.chunk_shape, dtype=self._dtype)
        chunk[tuple(slice(n) for n in local.shape)].copy_(local)
        return (chunk,), None

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

    def releases(self, fqn: str) -> bool:
        """No: chunks of dim 0 are the parameter."""
        del fqn
        return False
