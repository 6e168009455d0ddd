"""Models and their optimizers in folders of :class:`polyshard_checkpoint.Checkpoints`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from polyshard.errors import CheckpointError, UnsupportedError
from polyshard.plugins.seams import Stateful
from polyshard_accelerate.sharding import reshard
from polyshard_checkpoint import Checkpoints, TrainingState

__all__ = ["Owned", "divided", "load", "load_one", "plain", "save", "save_one"]

Owned = list[tuple[nn.Module, list[Optimizer]]]
"""Models with the optimizers of their parameters."""


def plain(optimizers: Iterable[Any]) -> list[Optimizer]:
    """The optimizers inside those of accelerate."""
    return [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]


def divided(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> tuple[Owned, list[Any]]:
    """Each model with the optimizers of its parameters; and the optimizers of others.

    Raises:
        UnsupportedError: for an optimizer with parameters of a model and others.
    """
    for model in models:
        reshard(model)  # optimizers have the sharded parameters
    owners = {id(p): index for index, model in enumerate(models) for p in model.parameters()}
    owned: Owned = [(model, []) for model in models]
    others: list[Any] = []
    for given, optimizer in zip(optimizers, plain(optimizers), strict=True):
        found = {owners.get(id(p)) for group in optimizer.param_groups for p in group["params"]}
        if len(found) > 1:
            raise UnsupportedError(
                f"{type(optimizer).__name__} has parameters of several models, or of one and "
                "others, which are saved apart. Make an optimizer for each."
            )
        index = found.pop() if found else None
        if index is None:
            others.append(given)
        else:
            owned[index][1].append(optimizer)
    return owned, others


def save(folder: Path, owned: Owned) -> None:
    """Save each model with the optimizers of its parameters.

    Raises:
        CheckpointError: on every rank alike, when it failed on any.
    """
    for index, (model, optimizers) in enumerate(owned):
        save_one(folder / f"polyshard_{index}", model, optimizers)


def load(folder: Path, owned: Owned) -> None:
    """Fill models and optimizers, prepared in the order they were saved in.

    Raises:
        CheckpointError: on every rank alike, when it is damaged, or does not fit.
    """
    for index, (model, optimizers) in enumerate(owned):
        load_one(folder / f"polyshard_{index}", model, optimizers)


def save_one(
    folder: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    shared: Mapping[str, Stateful] | None = None,
) -> None:
    """Save one model; the framework saves random state itself."""
    found = TrainingState(model, optimizers, shared=shared or {}, random=False)
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(0, found)


def load_one(
    folder: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    shared: Mapping[str, Stateful] | None = None,
) -> None:
    """Fill one model.

    Raises:
        CheckpointError: on every rank alike, when there is nothing, or nothing that fits.
    """
    found = TrainingState(model, optimizers, shared=shared or {}, random=False)
    with Checkpoints(folder) as checkpoints:
        if checkpoints.load(found) is None:
            raise CheckpointError(f"'{folder}' holds no checkpoint of polyshard.")
