"""The sharded side of a group whose tensors are of the user's own class.

Such a tensor keeps its memory to itself, so there is no shard buffer. It is cut with the operations
that FSDP2 cuts with, in its order (``chunk``, ``new_zeros``, ``narrow`` and ``copy_``), because a
tensor class need not know any other: torchao's NF4 takes a ``narrow`` of all its rows only, and a
``clone`` of it quantizes once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from polyshard._torch.private import Watched
from polyshard.params.parameter import ShardedParameter, Source
from polyshard.params.sharded import Shards
from polyshard.plugins.builtin import DeviceStorage
from polyshard.sharding.layout import ParameterLayout
from polyshard.sharding.mesh import MeshRoles


class ProtocolShards(Shards):
    """Sharded parameters whose local tensors are of the user's class, each with its own memory."""

    def __init__(self, sources: Sequence[Source], layout: Any, roles: MeshRoles) -> None:
        """Cut every source with the operations of its own class."""
        self.layout = layout
        self._rank = roles.shard_rank
        self.storage = DeviceStorage()  # gradients stay where they are reduced
        self._strays = set()
        self.parameters = [
            ShardedParameter(source, self._rows(source.value, placed))
            for source, placed in zip(sources, layout.parameters, strict=True)
        ]
        self.registry = self._new_registry()
        self.registry.register()
        self._note_locals()

    @torch.no_grad()
    def _rows(self, value: Tensor, placed: ParameterLayout) -> Tensor:
        start, stop = placed.bounds(self._rank)
        padded = value.new_zeros(placed.chunk_shape)
        if start < stop:
            own = value.chunk(placed.world_size, 0)[self._rank]
            padded.narrow(0, 0, stop - start).copy_(own)
        return padded if padded.shape[0] == stop - start else padded.narrow(0, 0, stop - start)

    def _note_locals(self) -> None:
        self._locals = [self.local(index) for index in range(len(self.parameters))]
        self.is_vacant = any(local.is_meta for local in self._locals)
        first = self._locals[0]
        # Nothing rests here: it stands for the dtype and device of the group.
        self.buffer = torch.empty(0, dtype=first.dtype, device=first.device)
        self.storage.rest(self.buffer)

    def padded(self, index: int) -> Tensor:
        """The local tensor with as many rows as the first rank's."""
        placed = self.layout.parameters[index]
        local = self.local(index)
        rows = placed.chunk_shape[0]
        if local.shape[0] == rows:
            return local
        padded = local.new_zeros(placed.chunk_shape)
        if local.shape[0]:
            padded.narrow(0, 0, local.shape[0]).copy_(local)
        for name, value in vars(local).items():  # what was put beside the data: a scale, a flag
            if getattr(padded, name, None) is None:
                setattr(padded, name, value)
        return padded

    @override
    def take_memory(self, device: torch.device) -> bool:
        """No: it is their class that knows how."""
        return False

    @override
    def _new_watched(self) -> list[Watched]:
        return []  # see have_moved()

    @override
    def have_moved(self) -> bool:
        """Whether modules hold other parameters, or those other tensors.

        Whether memory changed is unknown: such tensors need not have an address.
        """
        return any(
            self.local(index) is not noted or any(o.held is not p.parameter for o in p.owners)
            for index, (p, noted) in enumerate(zip(self.parameters, self._locals, strict=True))
        )

    @override
    def speaks_anew(self) -> bool:
        """No: their class speaks for them."""
        return False

    @override
    def adopt_replaced(self) -> bool:
        """Take over parameter objects that replaced ours; memory is theirs anyway."""
        changed = self._adopt_registered()
        noted = self._locals
        self._note_locals()
        for parameter in self.parameters:  # their dtype may have changed in place
            parameter.adopt(parameter.parameter)
        return changed or any(a is not b for a, b in zip(self._locals, noted, strict=True))
