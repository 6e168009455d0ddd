"""Small models and a training loop shared by the multi-rank tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from toy_meeting import await_all

import polyshard


class Block(nn.Module):
    """A residual feed-forward block with a norm: large, small and uneven parameters."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Embedding, blocks, head. ``hidden`` need not divide by anything."""

    def __init__(self, width: int = 192, hidden: int = 250, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(layers))
        self.head = nn.Linear(width, 101, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def build(seed: int = 0, **kwargs: Any) -> Model:
    """The same values everywhere."""
    torch.manual_seed(seed)
    return Model(**kwargs)


def shard(model: Model, fully_shard: Callable[..., Any], **kwargs: Any) -> Model:
    """Every block a unit, and the rest one."""
    for block in model.blocks:
        fully_shard(block, **kwargs)
    fully_shard(model, **kwargs)
    return model


class Branches(nn.Module):
    """Each forward names the parameters that it uses, all of one size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(width, width)) for _ in range(3))

    def forward(self, x: Tensor, uses: str) -> Tensor:
        return torch.stack([(getattr(self, name) * x).sum() for name in uses]).sum()


def tokens_for(step: int, rank: int, batch: int = 4, length: int = 8) -> Tensor:
    """This rank's batch of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 101, (batch, length), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross entropy of reproducing the input."""
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def reset_together(model: Any) -> None:
    """Break an iteration off that all ranks have gone through.

    One that resets in mid-step tells ranks that are still in it: they would raise.
    """
    await_all("reset", dist.get_world_size())
    model.reset_iter_state()


def full(value: Tensor) -> Tensor:
    """The whole tensor, whatever its form."""
    return value.full_tensor() if isinstance(value, DTensor) else value


@dataclass
class Run:
    """What a training run produced."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def train(model: nn.Module, batches: Sequence[Tensor], clip: float | None = None) -> Run:
    """AdamW over ``batches``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = Run()
    for tokens in batches:
        loss = loss_of(model, tokens)
        loss.backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            run.norms.append(float(full(norm)))
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
    return run


def assert_same_parameters(ours: nn.Module, other: nn.Module, *, exact: bool) -> None:
    """Names, order and values agree."""
    for (name, a), (other_name, b) in zip(
        ours.named_parameters(), other.named_parameters(), strict=True
    ):
        assert name == other_name
        whole, reference = full(a.detach()), full(b.detach())
        if exact:
            assert torch.equal(whole, reference), name
        else:
            # Sums of three or more in another order differ in the last bit, and Adam makes up to
            # a few per cent of the learning rate (1e-2) of that where a gradient is nearly zero.
            torch.testing.assert_close(whole, reference, rtol=2e-4, atol=3e-4, msg=name)


def chain(plugin: object, layers: int) -> nn.Sequential:
    """Small linear layers, each a unit, and a root without parameters of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    for layer in model:
        polyshard.fully_shard(layer, plugins=[plugin])
    polyshard.fully_shard(model, plugins=[plugin])
    return model


def run_chain(model: nn.Module) -> float:
    """Forward and backward of :func:`chain`; the loss."""
    loss = model(torch.ones(2, 4)).square().sum()
    loss.backward()
    return float(loss.detach())
