"""The sharded side of a group: one buffer, and a ``DTensor`` parameter on each of its slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyshard._torch_private import local_tensor, set_local_tensor
from polyshard.errors import LifecycleError, ModuleError
from polyshard.layout import GroupLayout, ParameterLayout
from polyshard.mesh import MeshRoles
from polyshard.parameter import Registry, ShardedParameter, Source
from polyshard.seams import ShardStorage


def local_view(flat: Tensor, placed: ParameterLayout, rank: int) -> Tensor:
    """This rank's rows of one parameter (``local_shape``) in a flat ``[shard_numel]`` tensor."""
    numel = placed.local_numel(rank)
    slot = flat[placed.shard_offset : placed.shard_offset + numel]
    return slot.view(placed.local_shape(rank))


class Shards:
    """Owns the shard buffer of a group and the sharded parameters that view it."""

    _prefetched: list[int] | None = None
    """Versions of the parameters when the storage was told to bring the shard near."""

    def __init__(
        self,
        sources: Sequence[Source],
        layout: GroupLayout,
        roles: MeshRoles,
        storage: ShardStorage,
        rest: Callable[[Tensor], Tensor],
    ) -> None:
        """Cut every source parameter and register its sharded form in its place.

        ``rest`` is the storage's own, checked.
        """
        self.layout = layout
        self.storage = storage
        self._rest = rest
        self._rank = roles.shard_rank
        first = sources[0].value
        resting = rest(self._cut(sources, first.dtype, first.device))
        self.buffer = resting
        self.parameters = [
            ShardedParameter(source, local_view(resting, placed, self._rank))
            for source, placed in zip(sources, layout.parameters, strict=True)
        ]
        self.registry = self._new_registry()
        self.registry.register()
        self._introduce()

    def _introduce(self) -> None:
        """Show the storage its parameters, if it wants to see them."""
        hold = getattr(self.storage, "hold", None)
        if hold is not None:
            hold([p.parameter for p in self.parameters])

    @torch.no_grad()
    def _cut(self, sources: Sequence[Source], dtype: torch.dtype, device: torch.device) -> Tensor:
        shard = torch.zeros(self.layout.shard_numel, dtype=dtype, device=device)
        for source, placed in zip(sources, self.layout.parameters, strict=True):
            value = source.value
            if placed.dim is not None:
                start, stop = placed.bounds(self._rank)
                value = value.narrow(placed.dim, start, stop - start)
            local_view(shard, placed, self._rank).copy_(value)
        return shard

    def _new_registry(self) -> Registry:
        return Registry((p.owners, p.parameter) for p in self.parameters)

    @property
    def dtype(self) -> torch.dtype:
        """Original dtype of the group's parameters."""
        return self.buffer.dtype

    def versions(self) -> list[int]:
        """Version counters of the sharded parameters: they count writes.

        The parameters' own: a write through a ``DTensor`` does not count on its local tensor.
        """
        return [p.parameter._version for p in self.parameters]

    def prefetch(self) -> None:
        """Tell the storage that a gather comes soon."""
        if self._prefetched is None and not self.buffer.is_meta:
            self._prefetched = self.versions()
            self.storage.prefetch()

    def forget_prefetched(self) -> None:
        """Have the storage drop what it brought near and nobody gathered."""
        if self._prefetched is not None:
            self.release()

    def release(self) -> None:
        """The gather has read the shard, or did without it."""
        self._prefetched = None
        self.storage.release()

    def fetch(self) -> None:
        """Have the shard where the gather reads it; what was prefetched and changed since is not.

        See :meth:`versions` for what counts as a change.
        """
        if self._prefetched is not None and self._prefetched != self.versions():
            self.storage.release()
        self._prefetched = None
        self.storage.fetch()

    def check_materialized(self) -> None:
        """Refuse to compute with parameters that hold no values yet.

        Raises:
            LifecycleError: naming every parameter still on the meta device.
        """
        if self.buffer.is_meta:
            names = [p.info.fqn for p in self.parameters]
            raise LifecycleError(
                f"these parameters are still on the meta device: {names}. Before the first "
                "forward call model.to_empty(device=...) and initialise them (or load a state "
                "dict with assign=True)."
            )

    def adopt_replaced(self) -> bool:
        """Bring parameters that were replaced or moved back into one shard buffer.

        ``to_empty``, ``.to(dtype)``, ``swap_tensors`` and ``load_state_dict(assign=True)`` leave
        each parameter with memory of its own, or put a new object in its place. Objects are kept
        (an optimizer may hold them); only their memory changes.

        Returns:
            Whether anything had to be done.
        """
        changed = self._adopt_registered()
        if not all(self._rests_here(p, q) for p, q in self._slots()):
            self._rebuild()
            changed = True
        if changed:
            self._introduce()
        return changed

    def _adopt_registered(self) -> bool:
        """Take over parameters that modules hold in place of ours; whether there were any."""
        changed = False
        for parameter in self.parameters:
            registered = self._registered(parameter)
            if registered is not parameter.parameter:
                parameter.adopt(registered)
                changed = True
        if changed:
            self.registry = self._new_registry()
            self.registry.register()
        return changed

    def _slots(self) -> zip[tuple[ShardedParameter, ParameterLayout]]:
        return zip(self.parameters, self.layout.parameters, strict=True)

    def _registered(self, parameter: ShardedParameter) -> nn.Parameter:
        owner = parameter.owners[0]
        found: object = owner.module._parameters.get(owner.name)
        if not isinstance(found, DTensor):
            raise ModuleError(
                f"'{parameter.info.fqn}' was replaced by a {type(found).__name__} that is not a "
                "DTensor after fully_shard. Load sharded values (DTensors), or use "
                "torch.distributed.checkpoint.state_dict.set_model_state_dict for full ones."
            )
        return cast("nn.Parameter", found)

    def _rests_here(self, parameter: ShardedParameter, placed: ParameterLayout) -> bool:
        local = local_tensor(cast("DTensor", parameter.parameter))
        if local.dtype != self.buffer.dtype or local.device != self.buffer.device:
            return False
        if local.numel() == 0 or local.device.type == "meta":
            return True
        expected = self.buffer.data_ptr() + placed.shard_offset * self.buffer.itemsize
        return local.data_ptr() == expected

    @torch.no_grad()
    def _rebuild(self) -> None:
        locals_ = [local_tensor(cast("DTensor", p.parameter)) for p in self.parameters]
        kinds = {(t.dtype, t.device) for t in locals_ if t.numel()}
        if len(kinds) > 1:
            found = {
                p.info.fqn: str(t.dtype) for p, t in zip(self.parameters, locals_, strict=True)
            }
            raise ModuleError(
                "parameters of one group were converted to different dtypes or devices after "
                f"fully_shard: {found}. Convert before fully_shard, or convert all of them alike."
            )
        dtype, device = kinds.pop() if kinds else (locals_[0].dtype, locals_[0].device)
        shard = torch.zeros(self.layout.shard_numel, dtype=dtype, device=device)
        for placed, local in zip(self.layout.parameters, locals_, strict=True):
            view = local_view(shard, placed, self._rank)
            if view.shape != local.shape:
                raise ModuleError(
                    f"'{placed.name}' now has a local shape of {tuple(local.shape)}, expected "
                    f"{tuple(view.shape)} on rank {self._rank}: its mesh or placement changed."
                )
            view.copy_(local)
        self.buffer = self._rest(shard)
        for parameter, placed in self._slots():
            view = local_view(self.buffer, placed, self._rank)
            set_local_tensor(cast("DTensor", parameter.parameter), view)
            parameter.adopt(parameter.parameter)
