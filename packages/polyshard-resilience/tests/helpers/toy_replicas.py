"""Replica groups in one world, with a manager that does what it is told."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh

WIDTH = 7


class Block(nn.Module):
    """A unit of two groups (fp32 and fp64), with buffers that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH + 2)
        self.scale = nn.Parameter(torch.full((3,), 1.5, dtype=torch.float64))
        self.down = nn.Linear(WIDTH + 2, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(rows))) * self.scale.sum().float()
        return rows + nn.functional.dropout(self.down(hidden), 0.1, self.training)


def build(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))


def rows(step: int, part: int) -> Tensor:
    """A batch that goes by the step, and by who of all ranks has it."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + part))


class Quiet:
    """Work that is done."""

    def wait(self) -> bool:
        return True


@dataclass
class ToyManager:
    """What torchft's does, over one axis of a mesh whose ranks are all alive.

    Attributes:
        mesh: its ranks are peers.
        heals: steps, by how many were begun, before which peer 1 takes the state of peer 0.
        fails: steps that are not committed.
        is_alone: whether the other groups are left out.
    """

    mesh: DeviceMesh
    heals: set[int] = field(default_factory=set)
    fails: set[int] = field(default_factory=set)
    begun: int = -1
    committed: int = 0
    sums: list[int] = field(default_factory=list)
    is_alone: bool = False
    _load: Callable[[Any], None] | None = None
    _state: Callable[[], Any] | None = None

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        self._load, self._state = load_state_dict, state_dict

    def start_quorum(self) -> None:
        self.begun += 1
        if self.begun not in self.heals:
            return
        assert self._load is not None
        assert self._state is not None
        ranks = dist.get_process_group_ranks(self.mesh.get_group())
        sent: list[Any] = [None, None]
        if self.rank == 0:
            with ThreadPoolExecutor(1) as threads:  # as torchft does
                state = threads.submit(self._state).result()
            buffer = io.BytesIO()
            torch.save(state, buffer)
            sent = [buffer.getvalue(), self.committed]
        dist.broadcast_object_list(sent, src=ranks[0], group=self.mesh.get_group())
        if self.rank == 1:
            self._load(torch.load(io.BytesIO(sent[0]), weights_only=True))
            self.committed = sent[1]

    def allreduce(self, tensor: Tensor, *, reduce_op: Any) -> Quiet:
        self.sums.append(tensor.numel())
        if self.is_alone:
            return Quiet()
        dist.all_reduce(tensor, group=self.mesh.get_group())
        if reduce_op == ReduceOp.AVG:
            tensor /= self.mesh.size()
        return Quiet()

    def should_commit(self) -> bool:
        commits = self.begun not in self.fails
        self.committed += commits
        return commits

    def current_step(self) -> int:
        return self.committed

    def num_participants(self) -> int:
        return 1 if self.is_alone else self.mesh.size()

    def participating_rank(self) -> int | None:
        return 0 if self.is_alone else self.rank

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()
