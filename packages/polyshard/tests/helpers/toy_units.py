"""The units of a model, and one whose units are called in any order."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyshard.engine.root import units_below
from polyshard.group.group import State


def states(model: nn.Module) -> set[State]:
    return {g.state for _, _, unit in units_below(model) for g in unit.groups}


class Tree(nn.Module):
    """Units that a random program calls in any order, subset and number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.units = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, program: list[int]) -> Tensor:
        for index in program:
            x = torch.tanh(self.units[index](x))
        return x
