"""Models that plans are made of: sizes that do not divide, and mistakes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from typing_extensions import override

from polyshard_demo.model import LanguageModel, ModelSettings

SEQUENCE = 16


def uneven() -> LanguageModel:
    """51 rows of a matrix leave a remainder over 2 and 4 ranks, and there are large shards too."""
    return LanguageModel(
        ModelSettings(width=128, layers=3, heads=2, hidden=2051, sequence=SEQUENCE)
    )


def small() -> LanguageModel:
    """No buffer of a group reaches a mebibyte."""
    return LanguageModel(ModelSettings(width=96, layers=4, heads=2, hidden=255, sequence=256))


def divided() -> LanguageModel:
    """What tensor parallelism can cut."""
    return LanguageModel(
        ModelSettings(width=128, layers=3, heads=4, hidden=2054, sequence=SEQUENCE)
    )


def frozen() -> LanguageModel:
    """The first two blocks are not trained, nor is the embedding: no gradient reaches them."""
    model = uneven()
    model.embedding.requires_grad_(False)
    model.blocks[:2].requires_grad_(False)
    return model


def columns(parameter: nn.Parameter) -> Shard | None:
    """Matrices by their columns."""
    return Shard(1) if parameter.ndim == 2 else None


def odd_vocabulary() -> nn.Module:
    return nn.Sequential(nn.Embedding(50257, 8), nn.Linear(8, 8))


def wide_layer() -> nn.Module:
    """A matrix that travels alone."""
    return nn.Sequential(nn.Linear(1024, 1024, bias=False))


def wide_inputs(batch: int, sequence: int) -> Tensor:
    return torch.ones(batch, sequence, 1024)


def one_layer() -> nn.Module:
    return nn.Linear(64, 64)


def raising() -> nn.Module:
    raise RuntimeError("the factory's own trouble")


def not_a_module() -> object:
    return 7


def not_a_plan() -> list[str]:
    return ["blocks"]


class Empty(nn.Module):
    """Nothing to shard."""


class Pair(nn.Module):
    """Takes two inputs, which are no tokens; returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    @override
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        for layer in self.layers:
            left = layer(left)
        return (left - right).square().mean()


def pair_inputs(batch: int, sequence: int) -> tuple[Tensor, Tensor]:
    shape = (batch, sequence, 8)
    return torch.zeros(shape), torch.zeros(shape)


def factories() -> dict[str, Any]:
    return {"uneven": uneven, "divided": divided, "frozen": frozen}


class Watching:
    """A plugin that does nothing."""

    name = "watching"
    polyshard_contract = 1


WATCHING = Watching()
