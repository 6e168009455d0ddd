"""What ``build()`` of a script returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Batch", "Job", "Loss", "adamw"]

Batch = Callable[[int, int, int], Any]
"""Of (step, rank, ranks): one rank's batch of a step, on the CPU."""
Loss = Callable[[nn.Module, Any], Tensor]
"""Of (model, batch): the mean loss of the batch, a 0-dim tensor."""


def adamw(model: nn.Module) -> Optimizer:
    """``torch.optim.AdamW`` with a learning rate of 0.001, and torch's defaults otherwise."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Job:
    """Something to train. A tuple of the first three fields does as well.

    Attributes:
        model: whole and not wrapped, on the CPU; or on the meta device, with ``reset_parameters()``
            in every module that has parameters or buffers of its own.
        batch: of (step, rank, ranks), steps from 0: what ``loss`` is given. What it draws from the
            global generators is the same for every engine.
        loss: of (model, batch). It calls ``model(...)``, which an engine may have wrapped.
        optimizer: of (model), once an engine has sharded it.
        units: patterns of module names that become units; none: members of module lists.
    """

    model: nn.Module
    batch: Batch
    loss: Loss
    # A plain default would be taken for a method of the class.
    optimizer: Callable[[nn.Module], Optimizer] = field(default_factory=lambda: adamw)
    units: tuple[str, ...] = ()
