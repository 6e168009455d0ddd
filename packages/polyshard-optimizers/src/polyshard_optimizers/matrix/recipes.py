"""What an owner makes of a whole gradient, and what every rank does with its rows of that.

[Note: what returns]
Any optimizer can be given whole weights and asked for new ones: weights go to the owner by rows
and come back by rows. Muon needs less. Its update follows from gradients alone, in bf16, and decay
and rate are applied to rows as well as to all: so nothing goes there, and half as much comes back,
to the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from polyshard_optimizers.matrix._torch_private import adjusted_lr, orthogonalized
from polyshard_optimizers.matrix.choosing import Cut

Settings = Mapping[str, Any]
State = dict[str, Any]


class Recipe(ABC):
    """How one class of optimizers is carried out."""

    needs_weights = True
    """Whether the owner needs the weights."""

    @abstractmethod
    def returns(self, parameter: Tensor) -> torch.dtype:
        """The dtype of what returns by rows."""

    @abstractmethod
    def update(
        self, gradient: Tensor, weights: Tensor | None, cut: Cut, state: State, settings: Settings
    ) -> Tensor:
        """On the owner: what is to return, in the shape of ``gradient``; ``state`` is its own."""

    @abstractmethod
    def apply(self, local: Tensor, rows: Tensor, cut: Cut, settings: Settings) -> None:
        """On every rank: change its rows of the weights."""


class MuonRecipe(Recipe):
    """``torch.optim.Muon``. See [Note: what returns]."""

    needs_weights = False

    @override
    def returns(self, parameter: Tensor) -> torch.dtype:
        del parameter
        return torch.bfloat16

    @override
    def update(
        self, gradient: Tensor, weights: Tensor | None, cut: Cut, state: State, settings: Settings
    ) -> Tensor:
        momentum = settings["momentum"]
        buffer = state.get("momentum_buffer")
        if buffer is None:
            buffer = torch.zeros_like(gradient).view(cut.count, *cut.shape)
            state["momentum_buffer"] = buffer
        buffer = buffer.view(gradient.shape)
        buffer.lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if settings["nesterov"] else buffer
        out = torch.empty(gradient.shape, dtype=torch.bfloat16, device=gradient.device)
        for into, matrix in zip(cut.views(out), cut.views(update), strict=True):
            into.copy_(orthogonalized(matrix, settings))
        return out

    @override
    def apply(self, local: Tensor, rows: Tensor, cut: Cut, settings: Settings) -> None:
        local.mul_(1 - float(settings["lr"]) * settings["weight_decay"])
        local.add_(rows, alpha=-adjusted_lr(settings, cut.shape))


COUNTED = "group."
"""Begins the names of state that is what a step changed of its group, from what to what."""
NUMBERS = (int, float)


class WholeRecipe(Recipe):
    """Any class of optimizers: it makes its step on whole weights. See [Note: what returns]."""

    def __init__(self, made_by: type[Optimizer], given: Settings) -> None:
        """``made_by`` is called with matrices and what was ``given``."""
        self._made_by = made_by
        self._given = given

    @override
    def returns(self, parameter: Tensor) -> torch.dtype:
        return parameter.dtype

    @override
    def update(
        self, gradient: Tensor, weights: Tensor | None, cut: Cut, state: State, settings: Settings
    ) -> Tensor:
        assert weights is not None
        if not cut.count:  # a parameter of no matrices
            return gradient.clone()
        matrices = [nn.Parameter(m.contiguous()) for m in cut.views(weights)]
        for matrix, part in zip(matrices, cut.views(gradient), strict=True):
            matrix.grad = part.contiguous()
        optimizer = self._made_by(matrices, **self._given)
        group = optimizer.param_groups[0]
        group.update({n: v for n, v in settings.items() if n != "params"})
        group.update(_counted(state, settings))
        for place, matrix in enumerate(matrices):
            if state:
                own = {n: v for n, v in state.items() if not n.startswith(COUNTED)}
                optimizer.state[matrix] = {n: _part(v, place) for n, v in own.items()}
        with torch.enable_grad():
            optimizer.step()
        kept = [optimizer.state[matrix] for matrix in matrices]
        state.clear()
        state.update({name: _joined([one[name] for one in kept]) for name in kept[0]})
        for name, before in settings.items():
            if type(before) in NUMBERS and group[name] != before:
                state[f"{COUNTED}{name}"] = [(before, group[name])] * len(matrices)
        return torch.stack([m.detach() for m in matrices]).view(gradient.shape)

    @override
    def apply(self, local: Tensor, rows: Tensor, cut: Cut, settings: Settings) -> None:
        del cut, settings
        local.copy_(rows)


def _counted(state: State, settings: Settings) -> dict[str, Any]:
    """What the last step changed of its group, unless the user has changed that since.

    The live group belongs to all matrices, each of which would count in it.
    """
    found = {}
    for name, values in state.items():
        if name.startswith(COUNTED):
            before, after = values[0]
            setting = name.removeprefix(COUNTED)
            if settings.get(setting) == before:
                found[setting] = after
    return found


def _part(values: Any, place: int) -> Any:
    """State of one matrix, of what :func:`_joined` made of those of all."""
    return values[place]


def _joined(values: Sequence[Any]) -> Any:
    """State of all matrices under one name: tensors stacked, anything else in a list."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    if len(tensors) == len(values) and len({(t.shape, t.dtype) for t in tensors}) == 1:
        return torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)
    return list(values)


def recipe_for(made_by: type[Optimizer], given: Settings) -> Recipe:
    """The cheapest way that is right for a class, which is made with what was ``given``."""
    return MuonRecipe() if made_by is torch.optim.Muon else WholeRecipe(made_by, given)
