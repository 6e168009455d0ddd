"""A model with matrices that tensor parallelism divides in all ways, and its training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from matrix_models import Reference, assert_weights, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from polyshard import clip_grad_norm_, fully_shard
from polyshard_optimizers import MatrixOptimizer
from polyshard_tensor_parallel import TensorParallel

WIDTH = 12


class Block(nn.Module):
    """Rows divided, evenly and not; columns; heads that parts keep, and do not; and the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 10)
        self.down = nn.Linear(10, WIDTH, bias=False)
        self.wide = nn.Linear(WIDTH, 13)
        self.whole_heads = nn.Linear(WIDTH, 12, bias=False)
        self.cut_heads = nn.Linear(WIDTH, 12, bias=False)
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.randn(2, WIDTH, 5) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x, (WIDTH,))
        x = x + self.down(torch.tanh(self.up(x))) + self.wide(x).sum(-1, keepdim=True) / 4
        x = x + torch.tanh(self.whole_heads(x)) + torch.tanh(self.cut_heads(x))
        x = x + torch.tanh(self.plain(x))
        each = torch.tanh(torch.einsum("bi,eij->bej", F.layer_norm(x, (WIDTH,)), self.experts))
        return x + F.pad(each.mean(1), (0, WIDTH - 5))


class Divided(nn.Module):
    """In double precision: sums in another order round, and bf16 would make more of it."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.to(dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def plan() -> dict[str, ParallelStyle]:
    found: dict[str, ParallelStyle] = {}
    for block in ("blocks.0", "blocks.1"):
        found |= {f"{block}.up": ColwiseParallel(), f"{block}.down": RowwiseParallel()}
        for name in ("wide", "whole_heads", "cut_heads"):
            found[f"{block}.{name}"] = ColwiseParallel(output_layouts=Replicate())
    return found


def heads(name: str, shape: tuple[int, ...]) -> int:
    """Of two parts, each has two of the four, but one and a half of the three."""
    return 4 if "whole_heads" in name else 3 if "cut_heads" in name else 1


def reference(size: int, **kwargs: Any) -> Reference:
    return Reference(size, blocks=heads, **{"build": Divided, **kwargs})


class DividedRun:
    """Over the axes of ``mesh``, the last of which is that of tensor parallelism, if called so."""

    def __init__(
        self, mesh: DeviceMesh, plugin: MatrixOptimizer, dtype: torch.dtype = torch.float64
    ) -> None:
        names = mesh.mesh_dim_names
        plugins: list[Any] = [plugin]
        assert names is not None
        self.model: Any = Divided(dtype)
        data: Any = mesh
        if names[-1] == "tp":
            data = mesh[names[:-1]] if mesh.ndim > 2 else mesh[names[0]]
            parallel = TensorParallel(plan(), mesh=mesh["tp"])
            parallel.apply(self.model)
            plugins.append(parallel)
        for block in self.model.blocks:
            fully_shard(block, mesh=data, plugins=plugins)
        fully_shard(self.model, mesh=data, plugins=plugins)
        self.plugin, self.optimizer = plugin, plugin.optimizer(self.model)
        self.rest = torch.optim.SGD(plugin.rest(self.model), lr=0.01)
        self.part = data.get_local_rank() if data.ndim == 1 else _place(data)

    def backward(self, step: int, parts: int = 1) -> None:
        self.model.zero_grad()
        for part in range(parts):
            last = part == parts - 1
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)
            loss_of(self.model, step, self.part * parts + part).backward()

    def train(
        self, steps: int, start: int = 0, *, parts: int = 1, clip: float | None = None
    ) -> list[float]:
        """Norms, where gradients are clipped."""
        norms = []
        for step in range(start, start + steps):
            self.backward(step, parts)
            if clip is not None:
                norms.append(float(clip_grad_norm_(self.model.parameters(), clip)))
            self.optimizer.step()
            self.rest.step()
        return norms

    def check(self, expected: nn.Module, atol: float = 1e-6) -> None:
        assert_weights(self.model, expected, atol)


def _place(mesh: DeviceMesh) -> int:
    first, second = mesh.get_coordinate() or (0, 0)
    return int(first) * mesh.size(1) + int(second)
