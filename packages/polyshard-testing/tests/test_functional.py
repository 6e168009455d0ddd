"""Functional collectives in ranks of tests give what torch's own give."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from polyshard_testing import ranks

OPS = torch.ops._c10d_functional


def wait(result: Tensor) -> Tensor:
    found: Tensor = OPS.wait_tensor(result)
    return found


@ranks(2)
def test_each_of_them(rank: int, size: int) -> None:
    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name
    own = torch.arange(6.0).view(3, 2) + 10 * rank
    rows = torch.cat([torch.arange(6.0).view(3, 2) + 10 * r for r in range(size)])
    before = own.clone()
    assert torch.equal(wait(OPS.all_gather_into_tensor(own, size, group)), rows)
    total = 2 * torch.arange(6.0).view(3, 2) + 10
    assert torch.equal(wait(OPS.all_reduce(own, "sum", group)), total)
    assert torch.equal(wait(OPS.all_reduce(own.t(), "sum", group)), total.t())
    assert torch.equal(wait(OPS.broadcast(own, 1, group)), torch.arange(6.0).view(3, 2) + 10)
    scattered = wait(OPS.reduce_scatter_tensor(rows + rank, "sum", size, group))
    assert torch.equal(scattered, 2 * rows[3 * rank : 3 * rank + 3] + 1)
    sent, received = ([1, 2], [1, 1]) if rank == 0 else ([1, 2], [2, 2])
    exchanged = wait(OPS.all_to_all_single(own, received, sent, group))
    assert torch.equal(exchanged, rows[[0, 3]] if rank == 0 else rows[[1, 2, 4, 5]])
    pairs = torch.complex(own, -own)
    assert torch.equal(wait(OPS.all_reduce(pairs, "sum", group)), torch.complex(total, -total))
    gathered = wait(OPS.all_gather_into_tensor(pairs, size, group))
    assert torch.equal(gathered, torch.complex(rows, -rows))
    assert torch.equal(own, before)
    for name in ("all_gather_into_tensor", "all_reduce", "all_to_all_single"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"_c10d_functional::{name}", "CPU")


@ranks(2)
def test_dtensors_use_them(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(15.0).view(5, 3)
    placed = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(placed.full_tensor(), whole)
    assert torch.equal(placed.redistribute(placements=[Shard(1)]).full_tensor(), whole)
    parts = DTensor.from_local(whole + rank, mesh, [Partial()])
    assert torch.equal(parts.redistribute(placements=[Shard(1)]).full_tensor(), 2 * whole + 1)
    weight: Any = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    gathered = weight.redistribute(placements=[Replicate()])
    (gathered.to_local(grad_placements=[Partial()]) * (rank + 1)).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad.full_tensor(), torch.full((5, 3), 3.0))
