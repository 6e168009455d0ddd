"""What no sharded engine can beat: the same compute, optimizer and bytes, with nothing around them.

A floor step moves every unit's shards into preallocated memory, runs the plain model forward and
backward, moves and sums every unit's gradients likewise, and steps the optimizer on plain shards.
Transfers are point to point, all of a unit's at once, on buffers that exist before the first step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass
class _Transfer:
    """One unit's bytes: a chunk per parameter and peer."""

    shards: list[Tensor]
    regions: list[Tensor]
    group: dist.ProcessGroup

    def gather(self) -> None:
        """Every shard to every peer, in place; the own one by copy."""
        rank, size = self.group.rank(), self.group.size()
        chunks = [r.chunk(size) for r in self.regions]
        works = []
        for step in range(1, size):
            source, target = (rank - step) % size, (rank + step) % size
            works += [self.group.recv([c[source]], source, 1) for c in chunks]
            works += [self.group.send([s], target, 1) for s in self.shards]
        torch._foreach_copy_([c[rank] for c in chunks], self.shards)
        for work in works:
            work.wait()

    def reduce(self) -> None:
        """Every region's chunks to their owners, summed there."""
        rank, size = self.group.rank(), self.group.size()
        chunks = [r.chunk(size) for r in self.regions]
        arrivals = [
            self.shards,
            *([torch.empty_like(s) for s in self.shards] for _ in range(size - 2)),
        ]
        works = []
        for step in range(1, size):
            peer = (rank - step) % size
            works += [self.group.recv([t], peer, 1) for t in arrivals[step - 1]]
            peer = (rank + step) % size
            works += [self.group.send([c[peer]], peer, 1) for c in chunks]
        for work in works:
            work.wait()
        own = [c[rank] for c in chunks]
        for term in (own, *arrivals[1:]):
            torch._foreach_add_(self.shards, term)
        torch._foreach_mul_(self.shards, 1 / size)


class Floor:
    """A plain model with the transfers and the optimizer of its sharded twin."""

    def __init__(self, model: nn.Module, units: list[nn.Module], learning_rate: float) -> None:
        """``units`` are freed after forward, and so gathered twice; the rest is gathered once."""
        group = dist.group.WORLD
        assert group is not None
        inner = {p for unit in units for p in unit.parameters()}
        outer = [p for p in model.parameters() if p not in inner]
        self._transfers = [_transfer(list(unit.parameters()), group) for unit in units]
        self._outer = _transfer(outer, group)
        shards = [s for t in (*self._transfers, self._outer) for s in t.shards]
        parameters = [nn.Parameter(torch.randn_like(s) * 0.02) for s in shards]
        for parameter, shard in zip(parameters, shards, strict=True):
            parameter.grad = shard
        self.optimizer = torch.optim.AdamW(parameters, lr=learning_rate, foreach=True)

    def gather(self) -> None:
        """All bytes of a forward."""
        for transfer in (*self._transfers, self._outer):
            transfer.gather()

    def gather_again_and_reduce(self) -> None:
        """All bytes of a backward."""
        for transfer in reversed(self._transfers):
            transfer.gather()
            transfer.reduce()
        self._outer.reduce()


def _transfer(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> _Transfer:
    size = group.size()
    rows = [-(-p.numel() // size) for p in parameters]
    shards = [torch.zeros(n) for n in rows]
    regions = [torch.zeros(n * size) for n in rows]
    return _Transfer(shards, regions, group)
