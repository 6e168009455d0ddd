"""A regression whose solution is known, trained on real ranks."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyshard import Observer, Plugin, fully_shard, hookimpl


class Reductions(Plugin, Observer):
    """Keeps the bytes that each reduction sends."""

    name = "reductions"

    def __init__(self) -> None:
        self.sent: list[int] = []

    @hookimpl
    def polyshard_observer(self) -> Observer:
        return self

    def on_reduce(self, group: str, payload_bytes: int) -> None:
        self.sent.append(payload_bytes)


def whole(tensor: Tensor | None) -> Tensor:
    """All of a sharded tensor; every rank calls it."""
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def train(rank: int, steps: int, *plugins: object, lr: float = 4.0) -> list[float]:
    """Losses of fitting a matrix with plain gradient descent from zero."""
    wanted = torch.randn(64, 48, generator=torch.Generator().manual_seed(7))
    model = nn.Linear(48, 64, bias=False)
    nn.init.zeros_(model.weight)
    fully_shard(model, plugins=plugins)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(96, 48, generator=generator)
        loss = (model(x) - x @ wanted.T).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def mean_gradient(rank: int, size: int, steps: int, *plugins: object) -> tuple[Tensor, Tensor]:
    """Of ``steps`` equal backwards: the mean of what arrived, and what each should have been."""
    gradients = [
        torch.randn(64, 48, generator=torch.Generator().manual_seed(r)) for r in range(size)
    ]
    model = nn.Linear(48, 64, bias=False)
    fully_shard(model, plugins=plugins)
    total = torch.zeros(64, 48)
    for _ in range(steps):
        # d/dW of sum(W x * y) is y x^T, summed over a batch of unit vectors x: any matrix y.
        (model(torch.eye(48)) * gradients[rank].T).sum().backward()
        total += whole(model.weight.grad)
        model.weight.grad = None
    return total / steps, sum(gradients[1:], gradients[0]) / size
