"""State of optimizers for other ranks: tensors of the parameters' form move, numbers are told."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from polyshard._torch.private import local_tensor
from polyshard.errors import SettingError, UnsupportedError
from polyshard_resilience.rollback.optimizers import Undoable

PARAMS = "params"


@dataclass(frozen=True)
class Like:
    """Stands for a tensor of the parameter's shape, and of ``dtype``."""

    dtype: torch.dtype


@dataclass(frozen=True)
class Number:
    """Stands for a 0-dim tensor (``value`` on the host), beside the parameter or on the host."""

    value: Tensor
    is_beside: bool


State = Mapping[str, Any]
"""Of one parameter: :class:`Like` for each tensor that moves, :class:`Number`, and values."""


@dataclass(frozen=True)
class OptimizerForm:
    """What a rank that joins has to know of one optimizer.

    Attributes:
        settings: of each parameter group.
        states: of each parameter, in the order of the groups; ``None`` where there is none yet.
    """

    settings: tuple[Mapping[str, Any], ...]
    states: tuple[State | None, ...]

    @classmethod
    def of(cls, optimizer: Optimizer, names: Mapping[int, str]) -> OptimizerForm:
        """Of an optimizer of the parameters with these ``names``, by identity.

        Raises:
            UnsupportedError: for state that is neither of the parameter's form nor a number.
        """
        settings = tuple(
            {name: _on_host(value) for name, value in group.items() if name != PARAMS}
            for group in optimizer.param_groups
        )
        held = optimizer.state
        states = tuple(_state(p, names[id(p)], held.get(p)) for p in parameters_of(optimizer))
        return cls(settings, states)

    def words(self) -> list[str]:
        """What ranks that hold the model must have alike: names and dtypes of the state."""
        return [
            ", ".join(f"{n} {v.dtype if isinstance(v, Like) else ''}" for n, v in state.items())
            for state in (one or {} for one in self.states)
        ]


def check_optimizers(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
    """Refuse what cannot be moved.

    Raises:
        SettingError: for what is no optimizer, or steps parameters of another model.
        UnsupportedError: for one with state outside of ``optimizer.state``.
    """
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer):
            raise SettingError(f"resize takes torch.optim.Optimizer objects, got {kind}.")
        if isinstance(optimizer, Undoable):
            raise UnsupportedError(
                f"{kind} keeps state outside of optimizer.state (offloaded, or on owners of whole "
                "matrices), which resize() does not move. Save a checkpoint, and load it with the "
                "new number of ranks."
            )
        alien = [tuple(p.shape) for p in parameters_of(optimizer) if id(p) not in names]
        if alien:
            raise SettingError(
                f"{kind} has a parameter of shape {alien[0]} that is not one of the model"
            )


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All, in the order of the groups."""
    return [p for group in optimizer.param_groups for p in group[PARAMS]]


def value_of(form: object, device: torch.device) -> Any:
    """What a rank that joins gets for ``form``, of a parameter on ``device``."""
    if isinstance(form, Number):
        return form.value.to(device if form.is_beside else "cpu", copy=True)
    return copy.deepcopy(form)


def _state(parameter: Tensor, name: str, state: object) -> State | None:
    if state is None:
        return None
    if not isinstance(state, Mapping):
        raise UnsupportedError(f"optimizer state of '{name}' is a {type(state).__name__}.")
    return {key: _form(parameter, name, key, value) for key, value in state.items()}


def _form(parameter: Tensor, name: str, key: str, value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    if value.shape == parameter.shape and _is_placed_like(value, parameter):
        return Like(value.dtype)
    if value.ndim == 0 and not isinstance(value, DTensor):
        is_beside = value.device.type != "cpu"
        return Number(value.detach().cpu(), is_beside)
    raise UnsupportedError(
        f"optimizer state '{key}' of '{name}' is a {type(value).__name__} of shape "
        f"{tuple(value.shape)}, neither placed like the parameter {tuple(parameter.shape)} nor a "
        "number. Save a checkpoint, and load it with the new number of ranks."
    )


def _is_placed_like(value: Tensor, parameter: Tensor) -> bool:
    if not (isinstance(value, DTensor) and isinstance(parameter, DTensor)):
        return isinstance(value, DTensor) == isinstance(parameter, DTensor)
    same = value.device_mesh == parameter.device_mesh and value.placements == parameter.placements
    return same and local_tensor(value).shape == local_tensor(parameter).shape


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
