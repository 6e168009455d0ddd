"""Steps that few optimizers and loops make."""

from __future__ import annotations

from typing import Any

import torch
from matrix_models import Shampoo
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from polyshard import fully_shard
from polyshard_optimizers import MatrixOptimizer
from polyshard_testing import ranks


class Counting(Optimizer):
    """Counts in its group, as warm-ups do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / group["count"])


def matrices(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) > 1


@ranks(1, 2)
def test_what_a_class_counts_in_its_group_goes_on(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 4, bias=False)
    before = model.weight.detach().clone()
    plugin = MatrixOptimizer(Counting, matrices=matrices)
    fully_shard(model, plugins=[plugin])
    optimizer = plugin.optimizer(model)
    for step in range(4):
        if step == 2:
            optimizer.load_state_dict(optimizer.state_dict())
        model(torch.ones(1, 4)).sum().backward()  # a gradient of ones
        optimizer.step()
        model.zero_grad()
    expected = before - 0.1 * (1 + 1 / 2 + 1 / 3 + 1 / 4)
    torch.testing.assert_close(model.weight.full_tensor().detach(), expected)


class WithNone(nn.Module):
    """Stacked matrices of which there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, 4, 5))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + torch.einsum("bi,eij->bej", x, self.none).sum()
        return out


@ranks(2)
def test_there_may_be_no_matrices(rank: int, size: int) -> None:
    model = WithNone()
    plugin = MatrixOptimizer(Shampoo, matrices=matrices)
    fully_shard(model, plugins=[plugin])
    optimizer = plugin.optimizer(model)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.none.shape == (0, 4, 5)


class Mixture(nn.Module):
    """A dense layer on all ranks, and an expert that each half has for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.expert = nn.Linear(4, 4, bias=False), nn.Linear(4, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.expert(self.dense(x))
        return out


@ranks(4)
def test_state_of_experts_stays_with_their_mesh(rank: int, size: int) -> None:
    """Other ranks have another expert in the same place of their optimizer."""
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("ep", "fsdp"))
    plugin = MatrixOptimizer(Shampoo, matrices=matrices)
    torch.manual_seed(0)
    model = Mixture()
    fully_shard(model.expert, mesh=mesh["fsdp"], plugins=[plugin])
    fully_shard(model, plugins=[plugin])
    optimizer = plugin.optimizer(model)
    for step in range(2):
        x = torch.randn(3, 4, generator=torch.Generator("cpu").manual_seed(rank // 2 + 2 * step))
        model(x.to(torch.get_default_device())).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def own() -> dict[str, Any]:
        state = optimizer.state[model.expert.weight]
        return {n: v.clone() for n, v in state.items() if isinstance(v, Tensor)}

    before = own()
    optimizer.load_state_dict(optimizer.state_dict())
    after = own()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name
