"""The sharded side of a group: one buffer, and a ``DTensor`` parameter on each of its slots.

[Note: changing hands]
``to_empty``, ``.to(dtype)``, ``swap_tensors`` and ``load_state_dict(assign=True)`` leave each
parameter with memory of its own, or put a new object in its place. Their values move into a shard
buffer at once, because other code may hold what they are later: a state dict taken after the change
has to follow the model. For the same reason memory that other code holds is never moved away from
a parameter that did not change, and never written over with the values of one that did:

* Slots that no other tensor shares are written to again, and everything else stays where it is.
* Else a new buffer is taken. A parameter that did not change moves there, unless other code holds
  it: such a *stray* keeps its place, and is copied into the buffer before each gather.

Parameters of different dtypes wait until the others are converted too, or the next forward refuses
them; those still on the meta device have no memory that could be held.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyshard._torch.private import (
    Watched,
    become,
    has_fsdp_protocol,
    have_moved,
    local_tensor,
    wrap_parameter,
)
from polyshard.errors import LifecycleError, ModuleError
from polyshard.memory.own_storage import Home, own_storage
from polyshard.params.parameter import Owner, Registry, ShardedParameter, Source
from polyshard.plugins.seams import ShardStorage, overrides
from polyshard.sharding.layout import GroupLayout, ParameterLayout
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport.base import Turn

Kind = tuple[torch.dtype, torch.device]


def local_view(flat: Tensor, placed: ParameterLayout, rank: int) -> Tensor:
    """This rank's rows of one parameter (``local_shape``) in a flat ``[shard_numel]`` tensor."""
    numel = placed.local_numel(rank)
    slot = flat[placed.shard_offset : placed.shard_offset + numel]
    return slot.view(placed.local_shape(rank))


class Shards:
    """Owns the shard buffer of a group and the sharded parameters that rest in it."""

    _prefetched: list[int] | None = None
    """Versions of the parameters when the storage was told to bring the shard near."""

    turn: Turn | None = None
    """Of the root, when there is one."""

    _told: tuple[int, list[int]] = (-1, [])
    """Turn and versions when the storage was last told that the shard may have been written."""

    is_vacant = False
    """Whether some parameter is on the meta device still."""

    speaking: frozenset[int] = frozenset()
    """Parameters whose local tensors were given FSDP2's all-gather protocol after sharding."""

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
        self._strays: set[int] = set()
        first = sources[0].value
        resting = rest(self._cut(sources, first.dtype, first.device))
        self.buffer = resting
        self.is_vacant = resting.is_meta
        self._homes = [self._new_home(placed) for placed in layout.parameters]
        self.parameters = [
            ShardedParameter(source, home.alias)
            for source, home in zip(sources, self._homes, strict=True)
        ]
        self.registry = self._new_registry()
        self.registry.register()
        self._watched = self._new_watched()
        self._introduce()

    def _introduce(self) -> None:
        """Show the storage its parameters."""
        self.storage.hold([p.parameter for p in self.parameters])

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

    @torch.no_grad()
    def take_memory(self, device: torch.device) -> bool:
        """Have parameters rest in memory of ``device`` without values, objects kept.

        ``to_empty`` gives each its own, from which what is in it is copied to the buffer.

        Returns:
            Whether it was done: not so unless all are on the meta device, without gradients.
        """
        given = [p.parameter for p in self.parameters]
        if not all(p.is_meta and p.grad is None for p in given) or not self.buffer.is_meta:
            return False
        shard = torch.empty(self.layout.shard_numel, dtype=self.buffer.dtype, device=device)
        end = 0
        for start, length in sorted(
            (p.shard_offset, p.local_numel(self._rank)) for p in self.layout.parameters
        ):
            shard[end:start].zero_()  # padding
            end = start + length
        shard[end:].zero_()
        self.buffer = self._rest(shard)
        self._homes = [self._new_home(placed) for placed in self.layout.parameters]
        for parameter, home in zip(self.parameters, self._homes, strict=True):
            own = parameter.parameter
            become(own, wrap_parameter(home.alias, parameter.spec, requires_grad=own.requires_grad))
            parameter.adopt(own)
        self.is_vacant = False
        self._watched = self._new_watched()
        self._introduce()
        return True

    def take_objects(self, parameters: Sequence[nn.Parameter]) -> None:
        """Have ``parameters``, which others hold, be the sharded parameters of this buffer."""
        for own, kept in zip(self.parameters, parameters, strict=True):
            become(kept, own.parameter)
            own.adopt(kept)
        self.registry = self._new_registry()
        self.registry.register()
        self._watched = self._new_watched()
        self._introduce()

    def _new_home(self, placed: ParameterLayout) -> Home:
        return Home.at(own_storage(local_view(self.buffer, placed, self._rank)))

    def _new_registry(self) -> Registry:
        return Registry((p.owners, p.parameter) for p in self.parameters)

    def add_owners(self, index: int, owners: tuple[Owner, ...]) -> None:
        """Register the parameter at ``index`` with more modules."""
        self.parameters[index].owners += owners
        self.registry = self._new_registry()
        self.registry.register()
        self._watched = self._new_watched()

    @property
    def dtype(self) -> torch.dtype:
        """Original dtype of the group's parameters."""
        return self.buffer.dtype

    def drop_gradients(self) -> None:
        """Forget the sharded gradients."""
        for parameter in self.parameters:
            parameter.parameter.grad = None

    def zero_gradients(self, modules: Collection[nn.Module], *, to_none: bool) -> None:
        """Forget the gradients of what ``modules`` use, or fill them with zeros."""
        for parameter in self.parameters:
            gradient = parameter.parameter.grad
            if gradient is None or not any(o.module in modules for o in parameter.owners):
                continue
            if to_none:
                parameter.parameter.grad = None
            else:
                plain = gradient.requires_grad_(False) if gradient.is_leaf else gradient.detach_()
                plain.zero_()

    def versions(self) -> list[int]:
        """Version counters of the sharded parameters, which count some of the writes to them.

        The parameters' own: a write through a ``DTensor`` does not count on its local tensor. See
        [Note: turns] of the freshness for what decides.
        """
        return [p.parameter._version for p in self.parameters]

    def prefetch(self) -> None:
        """Tell the storage that a gather comes soon."""
        if self._prefetched is None and not (self.is_vacant or self._strays):
            self._prefetched = self.versions()
            self._tell_changed()
            self.storage.prefetch()

    def forget_prefetched(self) -> None:
        """Have the storage drop what it brought near and no gather used."""
        if self._prefetched is not None:
            self.release()

    def release(self) -> None:
        """The gather has read the shard, or did without it."""
        self._prefetched = None
        self.storage.release()

    def fetch(self) -> None:
        """Have the shard where the gather reads it.

        What was prefetched is of this turn (see [Note: turns] of the freshness), and dropped if a
        write since then was counted.
        """
        if self._prefetched is not None and self._prefetched != self.versions():
            self.storage.release()
        self._prefetched = None
        if self._strays:
            self._copy_strays()
        self._tell_changed()
        self.storage.fetch()

    def _tell_changed(self) -> None:
        """Tell the storage of writes, if any can have been since it was told."""
        if not overrides(self.storage.changed, ShardStorage.changed):
            return
        (told, seen), versions = self._told, self.versions()
        if self.turn is None or not self.turn.vouches(told) or seen != versions:
            self.storage.changed()
        self._told = (-1 if self.turn is None else self.turn.number, versions)

    @property
    def has_strays(self) -> bool:
        """Whether the buffer holds all values only after :meth:`fetch`."""
        return bool(self._strays)

    @torch.no_grad()
    def _copy_strays(self) -> None:
        for index in self._strays:
            self._slot(index).copy_(self.local(index))

    def check_materialized(self) -> None:
        """Refuse to compute with parameters that hold no values yet.

        Raises:
            LifecycleError: naming every parameter still on the meta device.
        """
        if self.is_vacant:
            names = [p.info.fqn for p in self.parameters if p.parameter.is_meta]
            raise LifecycleError(
                f"these parameters are still on the meta device: {names}. Before the first "
                "forward call model.to_empty(device=...) and initialise them (or load a state "
                "dict with assign=True)."
            )

    # --- parameters that change hands -----------------------------------------------------------

    def have_moved(self) -> bool:
        """Whether modules hold other parameters, or parameters other memory, than they were given.

        Some ways to change them pass no hook: ``child.to()`` on a plain module within a unit.
        """
        return have_moved(self._watched)

    def _new_watched(self) -> list[Watched]:
        locals_ = [self.local(i) for i in range(len(self.parameters))]
        return [
            (o.module._parameters, o.name, p.parameter, local, local.data_ptr())
            for p, local in zip(self.parameters, locals_, strict=True)
            for o in p.owners
        ]

    def try_adopt_replaced(self) -> bool:
        """As :meth:`adopt_replaced`, leaving what cannot be packed to the next forward."""
        with suppress(ModuleError):
            return self.adopt_replaced()
        return False

    def adopt_replaced(self) -> bool:
        """Bring parameters that were replaced or moved back into one shard buffer.

        Objects are kept (an optimizer may hold them); only their memory changes. See
        [Note: changing hands].

        Returns:
            Whether anything had to be done.

        Raises:
            ModuleError: when they do not fit together; nothing was moved then.
        """
        # What is made here outlives the call, which may come from a forward in inference mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            changed = self._adopt_registered()
            changed = self._settle() or changed
            changed = self._listen() or changed
        self._watched = self._new_watched()
        if changed:
            self._introduce()
        return changed

    def speaks_anew(self) -> bool:
        """Whether local tensors were given the protocol, or lost it, since that was noted."""
        return self._speaking() != self.speaking

    def _speaking(self) -> frozenset[int]:
        every = range(len(self.parameters))
        return frozenset(i for i in every if has_fsdp_protocol(self.local(i)))

    def _listen(self) -> bool:
        before, self.speaking = self.speaking, self._speaking()
        return self.speaking != before

    def _adopt_registered(self) -> bool:
        """Take over parameters that modules hold instead of ours; whether there were any."""
        registered = [self._registered(p) for p in self.parameters]
        changed = False
        for parameter, found in zip(self.parameters, registered, strict=True):
            changed = changed or any(o.held is not found for o in parameter.owners)
            if found is not parameter.parameter:
                parameter.adopt(found)
                changed = True
            else:
                parameter.tell_again()
        if changed:
            self.registry = self._new_registry()
            self.registry.register()
        return changed

    def _registered(self, parameter: ShardedParameter) -> nn.Parameter:
        found: object = parameter.owners[0].held
        if found is parameter.parameter:  # a state dict may name any of the modules that share it
            others = (o.held for o in parameter.owners if o.held is not found)
            other = next(others, None)
            if other is not None and not _takes(parameter.parameter, other):
                found = other
        if not isinstance(found, DTensor):
            raise ModuleError(
                f"'{parameter.info.fqn}' was replaced by a {type(found).__name__} that is not a "
                "DTensor after fully_shard. Load sharded values (DTensors), or use "
                "torch.distributed.checkpoint.state_dict.set_model_state_dict for full ones."
            )
        return cast("nn.Parameter", found)

    def _settle(self) -> bool:
        locals_ = [self.local(i) for i in range(len(self.parameters))]
        kind = self._common_kind(locals_)
        vacant = {i for i, t in enumerate(locals_) if t.is_meta}
        waiting = vacant if kind[1].type != "meta" else set()
        moved = [i for i, t in enumerate(locals_) if i not in waiting and not self._rests(i, t)]
        self._check_shapes(moved)
        self.is_vacant = bool(vacant)
        if not moved:
            return False
        moved = self._without_shared(moved)
        if kind == _kind(self.buffer) and not any(self._is_held(i) for i in moved):
            self._fill(moved)
        else:
            self._move(kind, moved, waiting)
        return True

    def _common_kind(self, locals_: Sequence[Tensor]) -> Kind:
        kinds = {_kind(t) for t in locals_ if not t.is_meta} or {_kind(t) for t in locals_}
        if len(kinds) > 1:
            found = {
                p.info.fqn: f"{t.dtype} on {t.device}"
                for p, t in zip(self.parameters, locals_, strict=True)
            }
            raise ModuleError(
                "parameters of one group were converted to different dtypes or devices after "
                f"fully_shard: {found}. Convert before fully_shard, or convert all the same way."
            )
        return kinds.pop()

    def local(self, index: int) -> Tensor:
        """The local tensor of a sharded parameter, itself."""
        return local_tensor(cast("DTensor", self.parameters[index].parameter))

    def _slot(self, index: int) -> Tensor:
        return local_view(self.buffer, self.layout.parameters[index], self._rank)

    def _rests(self, index: int, local: Tensor) -> bool:
        """Whether a parameter still is where it was put."""
        home = self._homes[index]
        same_kind = _kind(local) == _kind(home.alias)
        if not same_kind or local.is_meta or not local.numel():
            return same_kind
        return local.data_ptr() == home.address

    def _is_held(self, index: int) -> bool:
        """Whether others hold the place in the buffer of a parameter that left it."""
        home = self._homes[index]
        return not (index in self._strays or home.was_shared) and home.holders > 0

    def _check_shapes(self, indices: Sequence[int]) -> None:
        for index in indices:
            placed, local = self.layout.parameters[index], self.local(index)
            expected = placed.local_shape(self._rank)
            if local.shape != expected:
                raise ModuleError(
                    f"'{placed.name}' now has a local shape of {tuple(local.shape)}, expected "
                    f"{expected} on rank {self._rank}: its mesh or placement changed."
                )

    def _without_shared(self, moved: list[int]) -> list[int]:
        """Leave memory that is shared with other processes where they look into it."""
        shared = {i for i in moved if self._may_stray and self._homes[i].holds(self.local(i))}
        for index in shared:
            self._homes[index] = Home.at(self._homes[index].alias)
        self._strays |= shared
        return [i for i in moved if i not in shared]

    def _fill(self, indices: Sequence[int]) -> None:
        """Have parameters rest in the buffer as it is."""
        self.forget_prefetched()
        for index in indices:
            self._slot(index).copy_(self.local(index))
        self._house(indices)

    def _move(self, kind: Kind, moved: Sequence[int], waiting: set[int]) -> None:
        """Take a new buffer for all parameters but strays and those without values."""
        dtype, device = kind
        shard = torch.zeros(self.layout.shard_numel, dtype=dtype, device=device)
        strays = self._new_strays(moved)
        every = range(len(self.parameters))
        housed = [i for i in every if i not in strays and i not in waiting]
        for index in housed:
            local_view(shard, self.layout.parameters[index], self._rank).copy_(self.local(index))
        self.forget_prefetched()
        self.buffer = shard
        self._house(housed)
        # Nothing here holds the old memory any more when the storage decides where the new one is
        # to rest. Should it fail, the parameters count as moved.
        homes, nowhere = self._homes, Home.at(torch.empty(0, device="meta"))
        self._homes = [homes[i] if i in strays else nowhere for i in every]
        self.buffer, self._strays = nowhere.alias, strays
        self.buffer = self._rest(shard)
        for index in waiting:
            self._homes[index] = self._new_home(self.layout.parameters[index])
        if self.buffer is shard:
            self._homes = [homes[i] if i in housed else h for i, h in enumerate(self._homes)]
        else:
            self._house(housed)

    @property
    def _may_stray(self) -> bool:
        """A storage that is shown its parameters relies on their places."""
        return not overrides(self.storage.hold, ShardStorage.hold)

    def _new_strays(self, moved: Sequence[int]) -> set[int]:
        """Parameters that did not change and that other code holds."""
        if not self._may_stray:
            return set()
        stayed = set(range(len(self.parameters))) - set(moved)
        return {i for i in stayed if self._homes[i].holders > 1}  # more than the parameter itself

    def _house(self, indices: Sequence[int]) -> None:
        """Point parameters at their places in the buffer, which hold their values."""
        for index in indices:
            home = self._homes[index] = self._new_home(self.layout.parameters[index])
            parameter = self.parameters[index]
            own, spec = parameter.parameter, parameter.wrap(home.alias)._spec
            become(own, wrap_parameter(home.alias, spec, requires_grad=own.requires_grad))
            parameter.adopt(own)
            self._strays.discard(index)


def _takes(kept: nn.Parameter, other: nn.Parameter) -> bool:
    """Whether ``kept`` took the values of a parameter that is like it."""
    if not (isinstance(kept, DTensor) and isinstance(other, DTensor)):
        return False
    mine, theirs = local_tensor(kept), local_tensor(other)
    if mine.is_meta or _kind(mine) != _kind(theirs) or kept.placements != other.placements:
        return False
    if mine.shape != theirs.shape:
        return False
    with torch.no_grad():
        mine.copy_(theirs)
    return True


def _kind(tensor: Tensor) -> Kind:
    return tensor.dtype, tensor.device
