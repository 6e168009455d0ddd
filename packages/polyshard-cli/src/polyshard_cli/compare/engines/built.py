"""An engine's model and optimizer, ready to step, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["Built", "Place", "Unit"]

Unit = tuple[nn.Module, ...]
"""Modules that are sharded together; mostly one."""


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    rank: int
    ranks: int
    device: torch.device


@dataclass(frozen=True)
class Built:
    """A job's model as an engine trains it.

    Attributes:
        model: to be called by the job's loss.
        optimizer: of its parameters.
        counted: bytes that the engine says it has sent from this rank; ``None`` where it does not
            count.
        plan: what the engine says it will do, for people; ``None`` where it says nothing.
    """

    model: nn.Module
    optimizer: Optimizer
    counted: Callable[[], int] | None = None
    plan: Callable[[], str] | None = None
