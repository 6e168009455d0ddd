"""A model, and what training it with quantized communication must give, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toy_models import loss_of

from polyshard import fully_shard
from polyshard_quantized import BlockFormat, round_trip

VOCABULARY = 61


class Block(nn.Module):
    """A residual feed-forward block; 65 rows divide by nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 65)
        self.down = nn.Linear(65, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Embedding, two blocks, head."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def build(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def shard(model: Model, plugins: Sequence[object], **keywords: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, plugins=list(plugins), **keywords)
    fully_shard(model, plugins=list(plugins), **keywords)
    return model


def tokens_for(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCABULARY, (2, 12), generator=generator)


def train(model: nn.Module, rank: int, steps: int = 3, micro_batches: int = 1) -> list[float]:
    """Losses of this rank's last micro-batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(steps):
        for micro in range(micro_batches):
            loss = loss_of(model, tokens_for(step + 100 * micro, rank))
            loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def plain_sum(terms: list[Tensor]) -> Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def of_pairs(terms: list[Tensor]) -> list[Tensor]:
    """The sum of each replica, which pairs of ranks share."""
    return [plain_sum(terms[i : i + 2]) for i in (0, 2)]


def sum_of_pairs(terms: list[Tensor]) -> Tensor:
    return plain_sum(of_pairs(terms))


@dataclass(frozen=True)
class Oracle:
    """All ranks' training in one process: plain modules, quantized where a plugin would.

    ``combine`` makes one gradient from those of all ranks, and ``plain`` where none is quantized.
    """

    world_size: int
    weights: BlockFormat | None
    combine: Callable[[list[Tensor]], Tensor]
    plain: Callable[[list[Tensor]], Tensor] = plain_sum
    min_numel: int = 4096

    def serves(self, value: Tensor) -> bool:
        return value.ndim >= 2 and value.numel() >= self.min_numel

    def decoded(self, masters: dict[str, Tensor]) -> dict[str, Tensor]:
        form = self.weights
        if form is None:
            return masters
        return {n: round_trip(v, form) if self.serves(v) else v for n, v in masters.items()}

    def train(self, model: Model, rank: int, steps: int = 3, micro_batches: int = 1) -> list[float]:
        masters = {n: p.detach().clone() for n, p in model.named_parameters()}
        losses = []
        for step in range(steps):
            model.load_state_dict(self.decoded(masters))
            total: dict[str, Tensor] = {}
            for micro in range(micro_batches):
                gradients = []
                for other in range(self.world_size):
                    model.zero_grad()
                    loss = loss_of(model, tokens_for(step + 100 * micro, other))
                    loss.backward()
                    if other == rank:
                        mine = float(loss.detach())
                    gradients.append(
                        {
                            n: p.grad.clone()
                            for n, p in model.named_parameters()
                            if p.grad is not None
                        }
                    )
                for name in gradients[0]:
                    terms = [g[name] for g in gradients]
                    combine = self.combine if self.serves(terms[0]) else self.plain
                    mean = combine(terms) / self.world_size
                    total[name] = total[name] + mean if name in total else mean
            losses.append(mine)
            for name, gradient in total.items():
                masters[name].add_(gradient, alpha=-0.5)
        return losses


def one_hop(form: BlockFormat) -> Callable[[list[Tensor]], Tensor]:
    """Every gradient quantized once, summed in rank order."""
    return lambda terms: plain_sum([round_trip(t, form) for t in terms])


def two_hops(form: BlockFormat) -> Callable[[list[Tensor]], Tensor]:
    """Pairs of ranks share a replica; their sums are quantized again."""

    def combine(terms: list[Tensor]) -> Tensor:
        pairs = of_pairs([round_trip(t, form) for t in terms])
        return plain_sum([round_trip(p, form) for p in pairs])

    return combine
