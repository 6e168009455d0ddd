"""A training run with everything that a checkpoint has to hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from toy_lifetimes import Lasting
from toy_models import Model, build, full, loss_of, shard

import polyshard
from polyshard_checkpoint import TrainingState


class Samples:
    """Draws the global batch of each step and knows where it is; all ranks draw the same."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.drawn = 0

    def next(self) -> Tensor:
        self.drawn += 1
        return torch.randint(0, 101, (12, 8), generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "drawn": self.drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.generator.set_state(state_dict["generator"])
        self.drawn = state_dict["drawn"]


class Meter:
    """Something that every rank counts for itself."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


@dataclass(frozen=True)
class Job:
    """One rank of a run."""

    rank: int
    size: int
    model: Model
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    samples: Samples
    meter: Meter
    plugin: Lasting

    @staticmethod
    def start(rank: int, size: int, seed: int = 0, **sharding: Any) -> Job:
        """A fresh run; another ``seed`` gives other weights, numbers and data."""
        plugin = Lasting()
        model = build(seed, width=20, hidden=30, layers=2)
        shard(model, polyshard.fully_shard, plugins=[plugin], **sharding)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        torch.manual_seed(100 * seed + rank)
        return Job(rank, size, model, optimizer, scheduler, Samples(seed), Meter(), plugin)

    @property
    def state(self) -> TrainingState:
        return TrainingState(
            self.model,
            [self.optimizer],
            shared={"scheduler": self.scheduler, "samples": self.samples},
            per_rank={"meter": self.meter},
        )

    def train(self, steps: int, drop: bool = True) -> list[float]:
        """Losses of this rank; with ``drop`` its inputs are dropped, by its own random numbers."""
        losses = []
        for _ in range(steps):
            batch = self.samples.next().chunk(self.size)[self.rank]
            if drop:
                batch = batch * (torch.rand(batch.shape) > 0.1)
            loss = loss_of(self.model, batch)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.meter.seen += batch.numel()
            for kept in self.plugin.kept.values():
                kept.value += loss.item()
            losses.append(loss.item())
        return losses

    def everything(self) -> dict[str, Any]:
        """All that the state holds, as values to compare."""
        return {
            "model": whole(self.model),
            "optimizer": [
                {k: full(v).clone() if isinstance(v, Tensor) else v for k, v in state.items()}
                for state in self.optimizer.state.values()
            ],
            "groups": [
                {k: v for k, v in group.items() if k != "params"}
                for group in self.optimizer.param_groups
            ],
            "scheduler": self.scheduler.state_dict(),
            "samples": self.samples.state_dict(),
            "meter": self.meter.state_dict(),
            "plugin": [kept.state_dict() for kept in self.plugin.kept.values()],
            "random": torch.rand(3),
        }


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(p.detach()).clone() for name, p in model.named_parameters()}


def assert_equal(found: Any, wanted: Any, where: str = "") -> None:
    """Bitwise, through containers."""
    if isinstance(wanted, Tensor):
        assert torch.equal(found.cpu(), wanted.cpu()), where
    elif isinstance(wanted, dict):
        assert set(found) == set(wanted), where
        for key in wanted:
            assert_equal(found[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), where
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_equal(one, other, f"{where}[{index}]")
    else:
        assert found == wanted, where


Sharding = Callable[[int], dict[str, Any]]
"""Keywords of ``fully_shard`` on so many ranks."""
