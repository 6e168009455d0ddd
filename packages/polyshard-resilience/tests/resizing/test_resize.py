"""Ranks that hold a model become others, in living processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from toy_models import full, loss_of, tokens_for
from toy_runs import assert_equal

import polyshard
import polyshard_resilience
from polyshard_resilience import Corruption, NonFinite
from polyshard_testing import ranks


def mesh_of(members: list[int]) -> DeviceMesh:
    return DeviceMesh(torch.get_default_device().type, members)


class Mixed(nn.Module):
    """Uneven, tied, frozen, zero-size, 0-dim and replicated parameters; buffers."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, 20)
        self.block = nn.Sequential(nn.Linear(20, 7), nn.GELU(), nn.Linear(7, 20))
        self.register_buffer("seen", torch.zeros(()))
        self.head = nn.Linear(20, 101, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.few = nn.Parameter(torch.ones(2, 3))
        self.none = nn.Parameter(torch.ones(0, 3))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.block(x) * self.scale + self.few.sum() + self.frozen.sum() + self.none.sum()
        self.seen += 1
        out: Tensor = self.head(x)
        return out


class Job:
    """A run on the ranks of a mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        self.model: Any = Mixed()
        polyshard.fully_shard(self.model.block, mesh=mesh)
        polyshard.fully_shard(self.model, mesh=mesh)
        inner = list(self.model.block.parameters())
        outer = [p for p in self.model.parameters() if all(p is not other for other in inner)]
        groups = [{"params": inner, "lr": 1e-3}, {"params": outer, "weight_decay": 0.1}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)

    def steps(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            loss_of(self.model, tokens_for(step, dist.get_rank())).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def whole(self) -> dict[str, Any]:
        """What a checkpoint of the run holds."""
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        state = {
            name: {key: _full(value) for key, value in self.optimizer.state[p].items()}
            for name, p in self.model.named_parameters()
            if p in self.optimizer.state
        }
        settings = [{n: v for n, v in g.items() if n != "params"} for g in self._groups]
        model = {name: _full(value) for name, value in tensors.items()}
        return {"model": model, "state": state, "settings": settings}

    @torch.no_grad()
    def load(self, saved: dict[str, Any]) -> None:
        """Continue from what a run on other ranks has saved."""
        for name, p in self.model.named_parameters():
            p.copy_(_cut(saved["model"][name], p))
            if name in saved["state"]:
                state = saved["state"][name]
                self.optimizer.state[p] = {key: _cut(value, p) for key, value in state.items()}
        for name, buffer in self.model.named_buffers():
            buffer.copy_(saved["model"][name])
        for group, settings in zip(self._groups, saved["settings"], strict=True):
            group.update(settings)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def resize(self, group: Any) -> polyshard_resilience.Resized:
        return polyshard_resilience.resize(self.model, self.optimizer, group)


def _full(value: Any) -> Any:
    return full(value.detach()).clone() if isinstance(value, Tensor) else value


def _cut(value: Any, like: Any) -> Any:
    """The part of this rank, if ``value`` is a whole tensor of the shape of ``like``."""
    if not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    mesh, placements = like.device_mesh, like.placements
    shape, offset = compute_local_shape_and_global_offset(like.shape, mesh, placements)
    part = value[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))].clone()
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def rows_that_move(extent: int, before: Sequence[int], after: Sequence[int]) -> int:
    """How many of ``extent`` rows have another owner afterwards, one row after another."""

    def owner(row: int, members: Sequence[int]) -> int:
        return members[row // -(-extent // len(members))]

    return sum(owner(row, before) != owner(row, after) for row in range(extent))


def least_bytes(job: Job, before: Sequence[int], after: Sequence[int]) -> int:
    """What has to move: rows of AdamW's three tensors, and for those that join what is whole."""
    joining = len(set(after) - set(before))
    least: int = joining * sum(b.nbytes for b in job.model.buffers())
    for p in job.model.parameters():
        copies = 3 if p.requires_grad else 1
        if p.ndim:
            rows = rows_that_move(p.shape[0], before, after) if p.numel() else 0
            least += copies * 4 * rows * (p.numel() // max(p.shape[0], 1))
        else:
            least += copies * 4 * joining
    return least


class Placed(nn.Module):
    """Parameters that are placed in other ways, and tensors that every rank has whole."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 6), nn.Linear(6, 2).bfloat16()
        self.ignored = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x)) + self.table
        out: Tensor = self.second(x.bfloat16()).float().sum() * self.ignored.sum()
        return out


def placed(mesh: DeviceMesh, *, is_fresh: bool) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    with torch.device("meta") if is_fresh else nullcontext():
        model: Any = Placed()

    def place(parameter: nn.Parameter) -> Any:
        return Shard(1) if parameter.ndim == 2 else Replicate() if len(parameter) == 2 else None

    ignored = {model.ignored}
    for module in (model.second, model):
        polyshard.fully_shard(module, mesh=mesh, shard_placement_fn=place, ignored_params=ignored)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@ranks(3)
def test_a_fresh_rank_joins(rank: int, size: int) -> None:
    """It brings a model on the meta device, sharded over itself alone."""
    polyshard_resilience.enable()
    meshes = [mesh_of([0, 1]), mesh_of([2])]
    model, optimizer = placed(meshes[rank == 2], is_fresh=rank == 2)
    parameters = list(model.parameters())

    def step() -> None:
        model(torch.ones(4, 7)).backward()
        optimizer.step()
        optimizer.zero_grad()

    told: list[Any] = [None]
    if rank < 2:
        step()
        optimizer.param_groups[0]["lr"] = 0.05  # as a scheduler does
        told = [_saved(model, optimizer)]
    dist.broadcast_object_list(told)
    polyshard_resilience.resize(model, optimizer, dist.group.WORLD)
    assert list(model.parameters()) == parameters
    assert_equal(_saved(model, optimizer), told[0])
    step()
    ends: list[Any] = [None] * size
    dist.all_gather_object(ends, _saved(model, optimizer))
    assert_equal(ends[2], ends[0])


@ranks(2)
def test_values_that_a_fresh_rank_lacked_are_not_compared(rank: int, size: int) -> None:
    """What it had on the meta device has the values of the others now."""
    polyshard_resilience.enable()
    meshes = [mesh_of([0]), mesh_of([1])]
    with torch.device("meta") if rank else nullcontext():
        model: Any = nn.Linear(4, 4)
    polyshard.fully_shard(model, mesh=meshes[rank], plugins=[polyshard.SameValues()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    polyshard_resilience.resize(model, optimizer, dist.group.WORLD)
    model(torch.ones(2, 4)).sum().backward()
    assert full(model.weight.grad).tolist() == [[2.0] * 4] * 4


@pytest.mark.parametrize("every", [1, 5])
@ranks(3)
def test_guards_follow_the_ranks_that_join(rank: int, size: int, every: int) -> None:
    """Those that stay have decided over two ranks, and have windows that a fresh one lacks."""
    polyshard_resilience.enable()
    model, optimizer = placed([mesh_of([0, 1]), mesh_of([2])][rank == 2], is_fresh=rank == 2)
    guard = Corruption(model, optimizer, every=every)
    NonFinite(optimizer)
    optimizer.param_groups[0]["lr"] = 1e-5  # so that it does not diverge

    def step() -> None:
        model(torch.ones(4, 7)).backward()
        optimizer.step()
        optimizer.zero_grad()

    if rank < 2:
        for _ in range(3):
            step()
    polyshard_resilience.resize(model, optimizer, dist.group.WORLD)
    guard.rebase()
    before = [full(p.detach()).clone() for p in model.parameters()]
    for _ in range(2 * every + 1):
        step()
    after = [full(p.detach()) for p in model.parameters()]
    assert all(value.isfinite().all() for value in after)
    assert not all(map(torch.equal, before, after)), "no guard has kept a step from changing them"


def _saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    tensors: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, p in model.named_parameters():
        tensors[f"{name} momentum"] = optimizer.state[p]["momentum_buffer"]
    tensors["lr"] = torch.tensor(optimizer.param_groups[0]["lr"])
    return {name: _full(value).cpu() for name, value in tensors.items()}


@ranks(4)
def test_ranks_leave_and_join(rank: int, size: int) -> None:
    """As after a checkpoint that the new number of ranks has loaded, to the bit."""
    polyshard_resilience.enable()
    job = Job(mesh_of([0, 1, 2, 3]))
    members, step = [0, 1, 2, 3], 0
    for target in ([0, 1, 2], [0, 2], [0, 1, 2, 3]):
        told: list[Any] = [None]
        if rank in members:
            job.steps(step, step + 1)
            told = [job.whole()]
        dist.broadcast_object_list(told, src=members[0])
        group, mesh = dist.new_group(target), mesh_of(target)
        moved = job.resize(group)
        bytes_of_all: list[Any] = [None] * size
        dist.all_gather_object(bytes_of_all, (moved.sent_bytes, moved.received_bytes))
        sent, received = (sum(each) for each in zip(*bytes_of_all, strict=True))
        assert sent == received == least_bytes(job, members, target)
        if rank in target:
            wanted = Job(mesh)
            wanted.load(told[0])
            assert_equal(job.whole(), wanted.whole())
            job.steps(step + 1, step + 2)
            wanted.steps(step + 1, step + 2)
            assert_equal(job.whole(), wanted.whole())
        members, step = target, step + 2
