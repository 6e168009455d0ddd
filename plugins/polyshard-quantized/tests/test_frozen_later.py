"""Parameters that are frozen while their gradients wait to be reduced."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from toy_models import full

from polyshard import fully_shard
from polyshard_quantized import Exclusions, Int8Block, QuantizedComm
from polyshard_testing import ranks


def gradients(rank: int, plugins: list[object]) -> list[Tensor]:
    """Of one weight, in three steps whose second micro-batch it is frozen for."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    for module in (*model, model):
        fully_shard(module, plugins=plugins)
    found: list[Tensor] = []
    weight: Any = model[0].weight
    for step in range(3):  # from the second on, memory of sums is used again
        x = torch.randn(8, 512, generator=torch.Generator("cpu").manual_seed(10 * step + rank))
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            weight.requires_grad_(not is_last)
            model(x.to(torch.get_default_device())).square().sum().backward()
        assert weight.grad is not None
        found.append(full(weight.grad).clone())
        weight.requires_grad_(True)
        model.zero_grad()
    return found


@ranks(2)
def test_what_waits_of_a_frozen_parameter_is_sent(rank: int, size: int) -> None:
    exclude = Exclusions(min_numel=0)
    plugin = QuantizedComm(weights=None, gradients=Int8Block(), exclude=exclude)
    for ours, native in zip(gradients(rank, [plugin]), gradients(rank, []), strict=True):
        assert 0 < (ours - native).norm() < 0.05 * native.norm()


def partial_sums(rank: int, mesh: DeviceMesh, plugins: list[object]) -> list[Tensor]:
    """Of one weight, frozen in every second micro-batch while its sums wait for replicas."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    fully_shard(model, mesh=mesh, plugins=plugins)
    found: list[Tensor] = []
    weight: Any = model[0].weight
    for step in range(2):
        x = torch.randn(8, 128, generator=torch.Generator("cpu").manual_seed(10 * step + rank))
        for is_last in (False, True):
            model.set_requires_all_reduce(is_last)
            weight.requires_grad_(not is_last)
            model(x.to(torch.get_default_device())).square().sum().backward()
        assert weight.grad is not None
        found.append(weight.grad.to_local().clone())
        weight.requires_grad_(True)
        model.zero_grad()
    return found


@ranks(4)
def test_what_waits_for_replicas_of_a_frozen_parameter_is_sent(rank: int, size: int) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    exclude = Exclusions(min_numel=0)
    plugin = QuantizedComm(weights=None, gradients=Int8Block(), exclude=exclude)
    own = partial_sums(rank, mesh, [plugin])
    for ours, native in zip(own, partial_sums(rank, mesh, []), strict=True):
        assert 0 < (ours - native).norm() < 0.05 * native.norm()
        replicas = [torch.empty_like(ours) for _ in range(2)]
        dist.all_gather(replicas, ours, group=mesh["replicate"].get_group())
        assert torch.equal(*replicas)
