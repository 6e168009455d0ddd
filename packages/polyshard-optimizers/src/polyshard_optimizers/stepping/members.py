"""The parameters of an optimizer that have a gradient now, and what is known of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from polyshard._torch.optimizers import local_of, state_of
from polyshard_optimizers.stepping.keeper import OptimizerKeeper

PLAIN_TYPES = (Tensor, nn.Parameter)


@dataclass(eq=False)
class Member:
    """A parameter that can be stepped as a part of a run.

    ``local`` is what this rank has of it. Of its gradient the address alone is kept: memory of
    gradients is used again when they are held no more. Its state is ``tensors`` (of the parameter's
    shape), ``scalars`` (0-dim) and ``values`` (anything else), all in ``state``, which is ``None``
    where the optimizer has none yet; it stays in its memory where that ``is_pinned``, so that the
    member is a run of its own.
    """

    parameter: Tensor
    group: int
    local: Tensor
    gradient_address: int
    state: dict[str, Any] | None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    is_pinned: bool = False

    @property
    def is_sharded(self) -> bool:
        """Whether it is a ``DTensor``."""
        return isinstance(self.parameter, DTensor)

    @property
    def numel(self) -> int:
        """Elements on this rank."""
        return self.local.numel()

    @property
    def kind(self) -> tuple[object, ...]:
        """What members of a run have in common, their scalars aside."""
        tensors = tuple((name, local_of(t).dtype) for name, t in self.tensors.items())
        scalars = tuple((name, t.dtype, t.device) for name, t in self.scalars.items())
        values = tuple((name, repr(value)) for name, value in self.values.items())
        where = self.local.dtype, self.local.device, self.is_sharded, self.numel == 0
        alone = id(self) if self.is_pinned else None
        order = tuple(self.state) if self.state else None
        return self.group, *where, alone, order, tensors, scalars, values


@dataclass(frozen=True)
class Survey:
    """All parameters with a gradient: members, and those that step as torch steps them."""

    members: list[Member]
    apart: list[tuple[int, Tensor]]
    """With their parameter groups: 0-dim ones, other classes, gradients placed in another way."""


def survey(optimizer: Optimizer, keeper: OptimizerKeeper | None = None) -> Survey:
    """Look at every parameter of ``optimizer`` that ``keeper`` does not lend."""
    found, states = Survey([], []), state_of(optimizer)
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.grad is None or (keeper is not None and keeper.is_lent(parameter)):
                continue
            # Not ``states[parameter]``: looking makes an entry, which torch would save.
            member = member_of(parameter, index, states.get(parameter))
            if member is None:
                found.apart.append((index, parameter))
                continue
            member.is_pinned = keeper is not None and keeper.is_pinned(parameter)
            found.members.append(member)
    return found


def member_of(parameter: Tensor, group: int, state: Any) -> Member | None:
    """``parameter``, with the state it has, if it can be stepped as a part of a run."""
    local, gradient = _parts(parameter)
    if local is None or gradient is None or not parameter.ndim:
        return None
    if not (_is_dense(local) and _is_dense(gradient) and _are_alike(local, gradient)):
        return None
    if state is not None and not isinstance(state, dict):
        return None
    member = Member(parameter, group, local, gradient.data_ptr(), state)
    return member if all(_sort(member, n, v) for n, v in (state or {}).items()) else None


def _parts(parameter: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What this rank has of a parameter and of its gradient, if they are of one form."""
    gradient = parameter.grad
    if isinstance(parameter, DTensor):
        if not isinstance(gradient, DTensor):
            return None, None
        same = parameter.placements == gradient.placements
        if not same or parameter.device_mesh != gradient.device_mesh:
            return None, None
    elif type(parameter) not in PLAIN_TYPES:
        return None, None
    return local_of(parameter), None if gradient is None else local_of(gradient)


def _is_dense(value: Tensor) -> bool:
    """Whether the memory of ``value`` holds its elements in order, and just as they are."""
    plain = type(value) in PLAIN_TYPES and value.layout is torch.strided
    if not plain or value.is_meta or value.is_conj() or value.is_neg():
        return False
    return value.is_contiguous()


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _sort(member: Member, name: str, value: Any) -> bool:
    """Note an entry of the state as what it is; whether a run can hold it."""
    if not isinstance(value, Tensor):
        member.values[name] = value
        return True
    if value.ndim == 0:
        member.scalars[name] = value
        return type(value) is Tensor
    local = local_of(value)
    member.tensors[name] = value
    of_one_form = type(value) is Tensor or (isinstance(value, DTensor) and member.is_sharded)
    fits = local.shape == member.local.shape and local.device == member.local.device
    return of_one_form and fits and _is_dense(local)
