"""What is private about ``torch.optim`` does what polyshard takes it to do."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import SGD, Adam

from polyshard._torch import optimizers
from polyshard_testing import ranks


def test_plain_steps_run_no_hooks() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = SGD([parameter], 1.0)
    seen: list[int] = []
    optimizer.register_step_pre_hook(lambda *a: seen.append(1))
    optimizers.plain_step(SGD)(optimizer)
    assert parameter.tolist() == [0.0, 0.0]
    assert not seen


def test_profiled_steps_run_hooks_once() -> None:
    calls: list[str] = []
    members = {"step": optimizers.profiled(lambda self: calls.append("step"))}
    kind: Any = type("Mine", (Adam,), members)
    optimizer = kind([nn.Parameter(torch.ones(2))])  # torch wraps steps when objects are made
    optimizer.register_step_pre_hook(lambda *a: calls.append("pre"))
    optimizer.step()
    assert calls == ["pre", "step"]


@ranks(1)
def test_locals_specs_and_quick_reads(rank: int, size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (1,))
    value = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    parameter = nn.Parameter(value)
    parameter.grad = value
    with optimizers.quick_reads():
        gradient = parameter.grad
    assert isinstance(gradient, DTensor)
    assert optimizers.locals_of([gradient]) == [gradient._local_tensor]
    assert optimizers.specs_of([gradient]) == [optimizers.spec_of(gradient)]
    assert optimizers.local_of(gradient) is gradient._local_tensor
    plain = torch.ones(2)
    assert optimizers.local_of(plain) is plain
    assert optimizers.spec_of(plain) is None


@ranks(1)
def test_repointing_keeps_objects(rank: int, size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (1,))
    spec = optimizers.spec_of(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    for kind in (spec, None):
        old, new = (optimizers.like(kind, torch.full((4,), v)) for v in (1.0, 2.0))
        assert optimizers.repointed(old, new) is old
        local = optimizers.local_of(old)
        assert local.data_ptr() == optimizers.local_of(new).data_ptr()
    other = torch.ones(3)
    assert optimizers.repointed(torch.ones(4), other) is other
    assert optimizers.repointed(3, other) is other
