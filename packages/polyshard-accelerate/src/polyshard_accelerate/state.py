"""Models and their optimizers in folders of :class:`polyshard_checkpoint.Checkpoints`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from polyshard.errors import CheckpointError
from polyshard.plugins.seams import Stateful
from polyshard_accelerate.sharding import reshard
from polyshard_checkpoint import Checkpoints, TrainingState

__all__ = ["load", "load_one", "plain", "save", "save_one"]


def plain(optimizers: Iterable[Any]) -> list[Optimizer]:
    """The optimizers inside those of accelerate."""
    return [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]


def save(folder: Path, models: Sequence[nn.Module], optimizers: Iterable[Any]) -> None:
    """Save each model with the optimizers of its parameters.

    Raises:
        CheckpointError: on every rank alike, when it failed on any.
    """
    for index, (model, own) in enumerate(_owned(models, plain(optimizers))):
        save_one(folder / f"polyshard_{index}", model, own)


def load(folder: Path, models: Sequence[nn.Module], optimizers: Iterable[Any]) -> None:
    """Fill models and optimizers, prepared in the order they were saved in.

    Raises:
        CheckpointError: on every rank alike, when it is damaged, or does not fit.
    """
    for index, (model, own) in enumerate(_owned(models, plain(optimizers))):
        load_one(folder / f"polyshard_{index}", model, own)


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


def _owned(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> Iterator[tuple[nn.Module, list[Optimizer]]]:
    """Each model with the optimizers that have parameters of it."""
    for model in models:
        reshard(model)  # optimizers have the sharded parameters
        own = {id(p) for p in model.parameters()}
        yield (
            model,
            [
                o
                for o in optimizers
                if any(id(p) in own for g in o.param_groups for p in g["params"])
            ],
        )
