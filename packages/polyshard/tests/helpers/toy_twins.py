"""A sharded model beside the same model in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from toy_models import full


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def pair() -> nn.Sequential:
    return nn.Sequential(linear(), linear())


def two_of(make: Any) -> tuple[Any, Any]:
    """A model, and another with the same values."""
    torch.manual_seed(0)
    ours, theirs = make(), make()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, ours_), theirs_ in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (ours_.grad is None) == (theirs_.grad is None), name
        if ours_.grad is not None:
            torch.testing.assert_close(full(ours_.grad), theirs_.grad, msg=name)
