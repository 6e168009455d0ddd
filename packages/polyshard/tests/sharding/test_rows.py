"""Rows that placements describe, and rows that ranks hold, are the same ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # before DTensorExtensions: torch imports the two from each other
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions
from toy_models import assert_same_parameters

from polyshard import Plugin, fully_shard, hookimpl
from polyshard.errors import PluginError
from polyshard.fsdp1 import from_fsdp_extensions
from polyshard.sharding.mesh import resolve_mesh
from polyshard.sharding.placement import Placed
from polyshard.sharding.rows import placements_of_rows
from polyshard_testing import ranks


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


def full(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@ranks(4)
def test_extensions_of_torch_keep_the_order_of_rows(rank: int, size: int) -> None:
    """Losses, gradients, optimizer steps and state dicts, against one process."""
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    model, oracle = Mlp(), Mlp()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    extensions = DTensorExtensions(torch.cpu)
    fully_shard(model, mesh=mesh["dp"], plugins=[from_fsdp_extensions(extensions)])
    weights = dict(oracle.named_parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), weights[name]), name
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, oracle))
    for step in range(3):
        inputs = [
            torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + i))
            for i in range(2)
        ]
        model(inputs[rank // 2]).square().mean().backward()
        for x in inputs:
            (oracle(x).square().mean() / 2).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(full(parameter.grad), weights[name].grad, msg=name)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(full(value), weights[name])
    again = Mlp()
    with torch.no_grad():
        again.up.weight.zero_()
    parallelize_module(again, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(again, mesh=mesh["dp"], plugins=[from_fsdp_extensions(extensions)])
    again.load_state_dict(model.state_dict())
    assert_same_parameters(again, model, exact=True)


class Answering(Plugin):
    """Flattens ``DTensor`` s, and answers with placements as told."""

    name = "answering"

    def __init__(self, mesh: DeviceMesh, placements: Any, *, copies: bool = False) -> None:
        self.mesh = mesh
        self.placements = placements
        self.copies = copies

    @hookimpl
    def pre_flatten_transform(self, tensor: Tensor) -> Any:
        if not isinstance(tensor, DTensor):
            return None
        local = tensor.to_local()
        return local.clone() if self.copies else local, tensor.placements

    @hookimpl
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        return DTensor.from_local(tensor, self.mesh["tp"], param_extension, run_check=False)

    @hookimpl
    def chunk_dtensor(self, tensor: DTensor, rank: int, device_mesh: DeviceMesh) -> DTensor:
        local = tensor.to_local().chunk(device_mesh.size())[rank]
        shape, stride = tensor.shape, tensor.stride()
        if self.copies:
            local = local.flip(0)
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=shape, stride=stride
        )


@ranks(4)
def test_placements_that_describe_other_rows_are_refused(rank: int, size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(48.0).view(8, 6)

    def sharded(cut: Any, *answer: Any, copies: bool = False) -> Any:
        model: Any = nn.Linear(6, 8)
        model.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [cut]))
        fully_shard(model, mesh=mesh["dp"], plugins=[Answering(mesh, answer, copies=copies)])
        return model.weight

    assert sharded(Replicate(), Shard(0), Replicate()).placements == (Shard(0), Replicate())
    assert sharded(Shard(1), Shard(0), Shard(1)).placements == (Shard(0), Shard(1))
    twice = sharded(Shard(0), Shard(0), Shard(0))
    assert torch.equal(twice.full_tensor(), whole), "made strided"
    pattern = r"chunk_dtensor answered .* for 'weight' \(8, 6\), which describes other rows"
    for cut, answer in (
        (Shard(0), (Shard(0), Replicate())),
        (Shard(1), (Shard(1), Shard(1))),
        (Replicate(), (Replicate(), Shard(0))),
        (Replicate(), (Replicate(), Replicate())),
    ):
        with pytest.raises(PluginError, match=pattern):
            sharded(cut, *answer)
    with pytest.raises(PluginError, match=pattern):  # nothing to go by but the values
        sharded(Replicate(), Shard(0), Replicate(), copies=True)


@ranks(4)
def test_what_is_accepted_is_right(rank: int, size: int) -> None:
    """Cut twice by hand, over even and uneven sizes: placements that are accepted are right."""
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    roles = resolve_mesh(mesh["dp"])
    accepted = 0
    for rows in range(1, 13):
        whole = torch.arange(float(rows))
        given = distribute_tensor(whole, mesh["tp"], [Shard(0)])
        local = given.to_local()
        extent = -(-len(local) // 2)
        own = local[roles.shard_rank * extent :][:extent]
        answer = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
        found = placements_of_rows(answer, given, Placed(0, roles))
        agreed: list[Any] = [None] * size
        torch.distributed.all_gather_object(agreed, str(found))
        assert len(set(agreed)) == 1, "the same on every rank"
        if found is not None:
            accepted += 1
            made = DTensor.from_local(
                own, mesh, found, run_check=False, shape=whole.shape, stride=(1,)
            )
            assert torch.equal(made.full_tensor(), whole), rows
    assert accepted >= 3, "every multiple of four at least"
