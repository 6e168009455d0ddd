"""Ranks that hold a model become others, in living processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from toy_models import loss_of, tokens_for

import polyshard
import polyshard_resilience
from polyshard_testing import ranks

WHOLE = StateDictOptions(full_state_dict=True)


class Mixed(nn.Module):
    """Uneven, tied, frozen, zero-size, 0-dim and replicated parameters; buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, 20)
        self.block = nn.Sequential(nn.Linear(20, 7), nn.GELU(), nn.Linear(7, 20))
        self.norm = nn.BatchNorm1d(20)
        self.head = nn.Linear(20, 101, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones((), device="cpu"))
        self.few = nn.Parameter(torch.ones(2, 3, device="cpu"))
        self.none = nn.Parameter(torch.ones(0, 3, device="cpu"))
        self.frozen = nn.Parameter(torch.ones(5, device="cpu"), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.block(x) * self.scale + self.few.sum() + self.frozen.sum() + self.none.sum()
        out: Tensor = self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))
        return out


class Job:
    """A run on the ranks of a mesh."""

    def __init__(self, mesh: DeviceMesh, device: str = "cpu") -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model: Any = Mixed()
        if device == "meta":
            for name in ("scale", "few", "none", "frozen"):
                given = getattr(self.model, name)
                made = nn.Parameter(torch.empty_like(given, device="meta"), given.requires_grad)
                setattr(self.model, name, made)
        polyshard.fully_shard(self.model.block, mesh=mesh)
        polyshard.fully_shard(self.model, mesh=mesh)
        inner = set(self.model.block.parameters())
        outer = [p for p in self.model.parameters() if p not in inner]
        groups = [{"params": list(inner), "lr": 1e-3}, {"params": outer, "weight_decay": 0.1}]
        groups[0]["params"] = list(self.model.block.parameters())
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)

    def steps(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            loss_of(self.model, tokens_for(step, dist.get_rank())).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def whole(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return get_state_dict(self.model, self.optimizer, options=WHOLE)

    def resize(self, group: Any) -> polyshard_resilience.Resized:
        return polyshard_resilience.resize(self.model, self.optimizer, group)


def group_of(members: Sequence[int]) -> Any:
    return dist.new_group(list(members))


def loaded(mesh: DeviceMesh, saved: Any) -> Job:
    """A new run that goes on from what was saved whole."""
    job = Job(mesh)
    model, optimizer = saved
    set_state_dict(
        job.model,
        job.optimizer,
        model_state_dict=model,
        optim_state_dict=optimizer,
        options=WHOLE,
    )
    return job


def assert_same(ours: Any, other: Any, where: str = "") -> None:
    """Every bit, everywhere in two trees."""
    assert type(ours) is type(other), where
    if isinstance(ours, dict):
        assert ours.keys() == other.keys(), where
        for key, value in ours.items():
            assert_same(value, other[key], f"{where}.{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(other), where
        for index, value in enumerate(ours):
            assert_same(value, other[index], f"{where}.{index}")
    elif isinstance(ours, DTensor):
        assert_same(ours.full_tensor(), other.full_tensor(), where)
    elif isinstance(ours, Tensor):
        assert torch.equal(ours, other), where
    else:
        assert ours == other, where


@ranks(4)
def test_ranks_leave_and_join(rank: int, size: int) -> None:
    """As after a checkpoint that the new number of ranks has loaded, to the bit."""
    polyshard_resilience.enable()
    job = Job(DeviceMesh("cpu", list(range(4))))
    members, step = [0, 1, 2, 3], 0
    for target in ([0, 1, 2], [2, 0], [0, 1, 2, 3]):
        told: list[Any] = [None]
        if rank in members:
            job.steps(step, step + 2)
            told = [job.whole()]
        dist.broadcast_object_list(told, src=members[0])
        group, mesh = group_of(target), DeviceMesh("cpu", target)
        moved = job.resize(group)
        assert (moved.sent_bytes > 0) == (rank in members)
        if rank in target:
            wanted = loaded(mesh, told[0])
            assert_same(job.whole(), wanted.whole())
            job.steps(step + 2, step + 4)
            wanted.steps(step + 2, step + 4)
            assert_same(job.whole(), wanted.whole())
        members, step = target, step + 4
