"""Checkpoints of model and optimizer, through ``torch.distributed.checkpoint``.

On disk: ``<run>/checkpoints/step-000100/`` holds the tensors in torch's format, under the original
names and in native precision, and ``state.json`` with the rest as plain data. A checkpoint is
written beside its final name and then renamed, so what has that name is complete. The tensors are
sharded by whoever loads them, so any world size and engine can go on from them.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from polyshard.checkpoint import CheckpointPlanner, CheckpointReader
from polyshard.files import replace_file
from polyshard_demo.errors import DemoError
from polyshard_demo.history import History
from polyshard_demo.worker import Worker

__all__ = ["Checkpoints", "find_checkpoint", "read_state"]

KEPT = 2
STATE = "state.json"


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run directory. Saving and loading are collective."""

    run: Path
    worker: Worker

    @property
    def directory(self) -> Path:
        """Where the checkpoints of the run are."""
        return self.run / "checkpoints"

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
    ) -> Path:
        """Write a checkpoint and drop all but the newest two; returns its directory."""
        final = self.directory / f"step-{step:06d}"
        partial = self.directory / f".{final.name}.partial"
        if self.worker.leads:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        tensors, _ = _tensors(model, optimizer)
        dcp.save(tensors, checkpoint_id=partial)
        if self.worker.leads:
            replace_file(partial / STATE, json.dumps({"step": step, **state}, indent=1).encode())
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            self._drop_old()
        dist.barrier()
        return final

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Fill model and optimizer, however they are sharded, from a checkpoint directory."""
        tensors, groups = _tensors(model, optimizer)
        try:
            reader = CheckpointReader(path)
            dcp.load(tensors, storage_reader=reader, planner=CheckpointPlanner())
        except (dcp.api.CheckpointException, RuntimeError, ValueError) as error:
            raise DemoError(f"cannot load {path} into this model: {error}") from error
        set_state_dict(
            model,
            optimizer,
            model_state_dict=tensors["model"],
            optim_state_dict={"state": tensors["optimizer"], "param_groups": groups},
        )

    def _drop_old(self) -> None:
        for old in complete_checkpoints(self.run)[:-KEPT]:
            if not old.is_symlink():  # what it points to is not ours to drop
                shutil.rmtree(old)


def complete_checkpoints(run: Path) -> list[Path]:
    """The run's checkpoint directories, oldest first."""
    found = (run / "checkpoints").glob("step-*")
    return sorted(path for path in found if (path / STATE).is_file())


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` is, or the newest one of the run directory that it is."""
    if (path / STATE).is_file():
        return path
    found = complete_checkpoints(path)
    if not found:
        raise DemoError(
            f"--resume {path}: no checkpoint there; give a run directory (which has checkpoints/) "
            "or one of its step-* directories"
        )
    return found[-1]


def read_state(path: Path) -> dict[str, Any]:
    """The plain data of a checkpoint directory, in the form that runs expect."""
    try:
        state = json.loads((path / STATE).read_text())
        if not isinstance(state, dict) or not isinstance(state.get("settings"), dict):
            raise ValueError("it holds no settings")
        History.from_plain(state["history"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        kind = type(error).__name__
        raise DemoError(f"cannot read {path / STATE}: {kind}: {error}") from error
    return state


def _tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Model and optimizer tensors by original name, and the optimizer's own settings.

    The settings (learning rate and the like) follow from the run's settings and are not saved, so
    that a checkpoint's payload is tensors alone.
    """
    weights, moments = get_state_dict(model, optimizer)
    groups = cast(list[dict[str, Any]], moments["param_groups"])
    return {"model": weights, "optimizer": moments["state"]}, groups
