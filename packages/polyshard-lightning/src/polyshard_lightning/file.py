"""Lightning's own checkpoints, one file each, into a module that is sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from polyshard import attach_optimizer
from polyshard.errors import CheckpointError

__all__ = ["load"]

NUMBERS = frozenset(("step", "eta", "mu", "mu_product"))
"""State that torch's optimizers keep as plain numbers, also of a parameter without dims."""


def load(
    path: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    strict: bool = True,
    weights_only: bool = False,
) -> dict[str, Any]:
    """Fill ``model`` and ``optimizers`` on this rank, from a file that all ranks see.

    Args:
        path: written by any strategy of Lightning's.
        model: sharded.
        optimizers: whose parameters are grouped as they were.
        strict: whether the file must have all weights and no other.
        weights_only: as of ``torch.load``.

    Returns:
        What is in the file.

    Raises:
        CheckpointError: when optimizers have other parameters than they had.
    """
    found: dict[str, Any] = torch.load(path, "cpu", weights_only=weights_only, mmap=True)
    options = StateDictOptions(full_state_dict=True, strict=strict)
    set_model_state_dict(model, found["state_dict"], options=options)
    states = found.get("optimizer_states", ())
    if optimizers and len(states) != len(optimizers):
        raise CheckpointError(
            f"'{path}' has the state of {len(states)} optimizers, and the module has "
            f"{len(optimizers)}. To begin with its weights alone, load them in the module: "
            "torch.load(path)['state_dict']."
        )
    for optimizer, state in zip(optimizers, states, strict=False):
        _fill(optimizer, state)
    return found


def _fill(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give ``optimizer`` whole state, of which it keeps this rank's shards."""
    attach_optimizer(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    have, had = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, saved["param_groups"])
    )
    if have != had:
        raise CheckpointError(
            f"{type(optimizer).__name__} has groups of {have} parameters, and had {had} when it "
            "was saved. Give it the groups that it had."
        )
    state = {
        index: {name: _placed(name, value, p) for name, value in saved["state"][key].items()}
        for index, (key, p) in enumerate(zip(keys, parameters, strict=True))
        if key in saved["state"]
    }
    own = optimizer.state_dict()["param_groups"]
    groups = [
        {**group, "params": mine["params"]}
        for group, mine in zip(saved["param_groups"], own, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _placed(name: str, value: Any, parameter: Tensor) -> Any:
    """``value`` sharded like ``parameter`` if it has its shape."""
    is_like = isinstance(value, Tensor) and value.shape == parameter.shape
    if not (is_like and isinstance(parameter, DTensor)) or (name in NUMBERS and not value.ndim):
        return value
    # Every rank has all of it: nothing is sent.
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)
