"""A model with matrices of all kinds, and the same training in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from polyshard import clip_grad_norm_, fully_shard
from polyshard_optimizers import MatrixOptimizer

HEADS, EXPERTS, WIDTH = 3, 2, 12


class Block(nn.Module):
    """Uneven rows, fewer than ranks, none; stacked experts, heads; one used twice, one turned."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 201)  # chunks that travel alone, on two ranks
        self.down = nn.Linear(201, WIDTH, bias=False)
        self.query = nn.Linear(WIDTH, 4 * HEADS, bias=False)
        self.short = nn.Linear(WIDTH, 2)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.tied.weight
        self.turned = nn.Parameter((torch.randn(WIDTH, 31) / 8).t())  # its rows are not contiguous
        self.nothing = nn.Parameter(torch.zeros(0, WIDTH))
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, 5) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x, (WIDTH,))  # the same at every scale: nothing grows without bounds
        x = x + self.down(torch.tanh(self.up(x))) + self.query(x)
        x = x + torch.tanh(x @ self.turned.t()) @ self.turned + (x @ self.nothing.t()).sum()
        x = x + self.again(torch.tanh(self.tied(x))) + self.short(x).sum(-1, keepdim=True)
        each = torch.einsum("bi,eij->bej", F.layer_norm(x, (WIDTH,)), self.experts)
        mixed = torch.tanh(each).mean(1)
        return x + F.pad(mixed, (0, WIDTH - mixed.shape[-1]))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def blocks_of(name: str, shape: tuple[int, ...]) -> int:
    return HEADS if "query" in name else 1


def batch(step: int, part: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step * 100 + part))


def loss_of(model: nn.Module, step: int, part: int) -> Tensor:
    loss: Tensor = model(batch(step, part)).square().mean()
    return loss


class Shampoo(Optimizer):
    """Preconditioners of both sides, a count, and decay that depends on the weights."""

    def __init__(self, params: Any, lr: float = 0.1, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                g, state = p.grad, self.state[p]
                assert p.ndim == 2
                if not state:
                    state |= {"steps": 0, "left": torch.eye(p.shape[0]) * 1e-3}
                    state["right"], state["moment"] = torch.eye(p.shape[1]), torch.zeros_like(p)
                state["steps"] += 1
                state["left"] += g @ g.T
                state["moment"].lerp_(g, 0.1)
                right = torch.linalg.solve(state["right"] + g.T @ g, state["moment"].T).T
                p.add_(right + group["decay"] * p, alpha=-group["lr"] / state["steps"])
        return None


Order = Callable[[Sequence[Tensor]], Tensor]


def in_turn(parts: Sequence[Tensor]) -> Tensor:
    """Rank after rank."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def by_replicas(parts: Sequence[Tensor]) -> Tensor:
    """Two shards a replica, then the replicas."""
    return in_turn([in_turn(parts[i : i + 2]) for i in range(0, len(parts), 2)])


@dataclass
class Reference:
    """One process; gradients of all ranks are added in the order that ranks add them.

    ``synced``: a micro-batch is added up over ranks at once, not when all of a step are through.
    """

    size: int
    made_by: type[Optimizer] = torch.optim.Muon
    settings: dict[str, Any] = field(default_factory=lambda: {"lr": 0.02})
    order: Order = in_turn
    clip: float | None = None
    parts: int = 1
    synced: bool = False
    build: Callable[[], nn.Module] = Model
    blocks: Callable[[str, tuple[int, ...]], int] = blocks_of

    def __post_init__(self) -> None:
        self.model = self.build()
        self.norms: list[float] = []
        self.matrices: dict[str, list[nn.Parameter]] = {}
        for name, p in self.model.named_parameters():
            if p.ndim > 1 and not name.startswith("head"):
                self.matrices[name] = [nn.Parameter(v.clone()) for v in self.views(name, p)]
        every = [m for ms in self.matrices.values() for m in ms]
        self.optimizer = self.made_by(every, **self.settings)
        rest = [p for n, p in self.model.named_parameters() if n not in self.matrices]
        self.rest = torch.optim.SGD(rest, lr=0.01)

    def views(self, name: str, value: Tensor) -> list[Tensor]:
        value = value.detach()
        return list(value if value.ndim == 3 else value.chunk(self.blocks(name, (0, 0))))

    def gradient(self, step: int, rank: int) -> list[Tensor]:
        """Of all micro-batches of a rank."""
        return self._gradient(step, range(rank * self.parts, (rank + 1) * self.parts))

    def _gradient(self, step: int, batches: Iterable[int]) -> list[Tensor]:
        self.model.zero_grad()
        for batch in batches:
            loss_of(self.model, step, batch).backward()
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def _mean(self, by_rank: list[list[Tensor]]) -> list[Tensor]:
        return [self.order(each) / self.size for each in zip(*by_rank, strict=True)]

    def _means(self, step: int) -> list[Tensor]:
        ranks = range(self.size)
        if not self.synced:
            return self._mean([self.gradient(step, rank) for rank in ranks])
        means = [
            self._mean([self._gradient(step, [rank * self.parts + part]) for rank in ranks])
            for part in range(self.parts)
        ]
        return [in_turn(each) for each in zip(*means, strict=True)]

    def train(self, steps: int, start: int = 0, norms: Sequence[Tensor] = ()) -> Reference:
        """``norms`` are those that gradients are taken to have before they are clipped."""
        for step in range(start, start + steps):
            for p, mean in zip(self.model.parameters(), self._means(step), strict=True):
                p.grad = mean
            if self.clip is not None:
                every = list(self.model.parameters())
                norm = nn.utils.get_total_norm([p.grad for p in every if p.grad is not None])
                self.norms.append(float(norm))
                norm = norms[step - start] if norms else norm
                nn.utils.clip_grads_with_norm_(every, self.clip, norm)
            named = dict(self.model.named_parameters())
            for name, matrices in self.matrices.items():
                gradient = named[name].grad
                assert gradient is not None
                for matrix, part in zip(matrices, self.views(name, gradient), strict=True):
                    matrix.grad = part.clone()
            self.optimizer.step()
            self.rest.step()
            with torch.no_grad():
                for name, matrices in self.matrices.items():
                    named[name].copy_(torch.cat([*matrices]).view(named[name].shape))
        return self


class Run:
    """The same over shards."""

    def __init__(
        self, mesh: DeviceMesh, plugin: MatrixOptimizer, *beside: Any, **kwargs: Any
    ) -> None:
        self.plugin, self.model = plugin, Model()
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, plugins=[plugin, *beside], **kwargs)
        fully_shard(self.model, mesh=mesh, plugins=[plugin, *beside], **kwargs)
        self.optimizer = plugin.optimizer(self.model)
        self.rest = torch.optim.SGD(plugin.rest(self.model), lr=0.01)

    def backward(self, step: int, rank: int, parts: int = 1, *, sync: bool = False) -> None:
        self.model.zero_grad()
        for part in range(parts):
            last = part == parts - 1
            self.model.set_requires_gradient_sync(sync or last)  # type: ignore[operator]
            self.model.set_is_last_backward(last)  # type: ignore[operator]
            loss_of(self.model, step, rank * parts + part).backward()

    def train(
        self, rank: int, steps: int, start: int = 0, clip: float | None = None, **kwargs: Any
    ) -> list[Tensor]:
        """The norms that were clipped."""
        norms = []
        for step in range(start, start + steps):
            self.backward(step, rank, **kwargs)
            if clip is not None:
                norms.append(clip_grad_norm_(self.model.parameters(), clip))
            self.optimizer.step()
            self.rest.step()
        return norms

    def check(self, expected: nn.Module, atol: float = 1e-6) -> None:
        assert_weights(self.model, expected, atol)


def assert_weights(model: nn.Module, expected: nn.Module, atol: float) -> None:
    """Those of a sharded model are those of ``expected``."""
    named = dict(expected.named_parameters())
    ours: Any
    for name, ours in model.named_parameters():
        whole, wanted = ours.full_tensor(), named[name].detach()
        says = partial("{}: {}".format, name)  # which one, and then what differs
        torch.testing.assert_close(whole, wanted, rtol=0, atol=atol, msg=says)


def muon(**kwargs: Any) -> MatrixOptimizer:
    return MatrixOptimizer(torch.optim.Muon, blocks=blocks_of, **{"lr": 0.02, **kwargs})


def shampoo(**kwargs: Any) -> MatrixOptimizer:
    return MatrixOptimizer(Shampoo, blocks=blocks_of, **kwargs)
