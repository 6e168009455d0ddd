"""Checkpoints of Lightning as folders of :class:`polyshard_checkpoint.Checkpoints`.

A folder has the weights and the state of optimizers under their names, each rank its own shards,
and what else Lightning saves (loops, callbacks, schedulers, hyperparameters) as one rank has it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from polyshard.errors import CheckpointError
from polyshard_checkpoint import Checkpoints, TrainingState
from polyshard_checkpoint.together import Ranks

__all__ = ["Rest", "load", "save"]


@dataclass
class Rest:
    """What Lightning saves beside tensors, as bytes: objects of any class may be in it."""

    content: bytes = b""

    def state_dict(self) -> dict[str, Any]:
        """What is saved."""
        return {"content": self.content}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was saved."""
        self.content = state["content"]

    def put(self, values: dict[str, Any]) -> None:
        """Make bytes of ``values``."""
        buffer = io.BytesIO()
        torch.save(values, buffer)
        self.content = buffer.getvalue()

    def get(self, *, weights_only: bool) -> dict[str, Any]:
        """The values again, by ``torch.load``."""
        found = torch.load(io.BytesIO(self.content), "cpu", weights_only=weights_only)
        assert isinstance(found, dict)
        return found


def save(
    path: Path, model: nn.Module, optimizers: Sequence[Optimizer], values: dict[str, Any]
) -> None:
    """Save on all ranks; what was at ``path`` before stays until this is complete.

    Raises:
        CheckpointError: on every rank alike, when it failed on any.
    """
    rest = Rest()
    rest.put(values)
    state = _state(model, optimizers, rest)
    # A file of another strategy stays until the folder that takes its place is complete.
    beside = path.with_name(f".{path.name}.new")
    with Ranks() as ranks:
        is_file = ranks.led(f"look at '{path}'", path.is_file)
        with Checkpoints(beside if is_file else path, keep=1) as checkpoints:
            checkpoints.save(int(values["global_step"]), state)
        if is_file:
            ranks.led(f"replace '{path}'", partial(_replace, path, beside))


def _replace(file: Path, folder: Path) -> None:
    file.unlink()
    folder.rename(file)


def load(
    path: Path, model: nn.Module, optimizers: Sequence[Optimizer], *, weights_only: bool
) -> dict[str, Any]:
    """Fill ``model`` and ``optimizers``, however they are sharded; the values that were saved.

    Raises:
        CheckpointError: on every rank alike, when it is damaged, or does not fit.
    """
    rest = Rest()
    with Checkpoints(path) as checkpoints:
        if checkpoints.load(_state(model, optimizers, rest)) is None:
            raise CheckpointError(
                f"'{path}' holds no checkpoint of PolyshardStrategy. Folders of Lightning's own "
                "strategies become files that it takes by "
                "`python -m lightning.pytorch.utilities.consolidate_checkpoint`."
            )
    return rest.get(weights_only=weights_only)


def _state(model: nn.Module, optimizers: Sequence[Optimizer], rest: Rest) -> TrainingState:
    # Lightning does not save random state: a checkpoint must not change what it leaves alone.
    return TrainingState(model, tuple(optimizers), shared={"lightning": rest}, random=False)
