"""A model with every odd kind of parameter, and a loop that trains it with or without offload."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from toy_models import full, loss_of

from polyshard import FSDPModule, MixedPrecisionPolicy, fully_shard
from polyshard_offload import DiskSettings, Offload

STEPS = 20
TIERS = [
    ("device", "device", "host"),
    ("device", "device", "disk"),
    ("host", "host", "host"),
    ("host", "host", "disk"),
    ("host", "disk", "disk"),
    ("disk", "host", "host"),
    ("disk", "host", "disk"),
    ("disk", "disk", "disk"),
]
"""Of parameters, gradients and optimizer state."""
SMALL = 2000
"""Bytes of a chunk: many chunks in a small model."""


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.ones(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.scale * self.down(F.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Uneven, zero-dimensional, zero-size, unused, frozen and tied parameters."""

    def __init__(self, width: int = 24, hidden: int = 37, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(layers))
        frozen: Any = self.blocks[1]
        frozen.down.weight.requires_grad_(False)
        self.head = nn.Linear(width, 31, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


@dataclass(frozen=True)
class Recipe:
    """How a toy is trained."""

    steps: int = STEPS
    micro_batches: int = 1
    sync_every: bool = False
    clip: float | None = None
    bf16: bool = False
    schedule: bool = True
    hsdp: bool = False
    alone: bool = False
    """Every rank trains a model of its own, sharded over itself."""
    optimizer: str = "AdamW"
    keep_gradients: bool = False

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
            "AdamW": lambda g: torch.optim.AdamW(g, lr=1e-2),
            "fused": lambda g: torch.optim.AdamW(g, lr=1e-2, fused=True),
            "foreach": lambda g: torch.optim.AdamW(g, lr=1e-2, foreach=True),
            "amsgrad": lambda g: torch.optim.Adam(g, lr=1e-2, amsgrad=True),
            "SGD": lambda g: torch.optim.SGD(g, lr=1e-2),
            "momentum": lambda g: torch.optim.SGD(g, lr=1e-2, momentum=0.9, nesterov=True),
            "RMSprop": lambda g: torch.optim.RMSprop(g, lr=1e-3, centered=True, momentum=0.5),
            "Adagrad": lambda g: torch.optim.Adagrad(g, lr=1e-2),
            "NAdam": lambda g: torch.optim.NAdam(g, lr=1e-2),
            "RowNorm": lambda g: RowNorm(g, lr=1e-2),
        }
        return kinds[self.optimizer](groups_of(model))


class RowNorm(torch.optim.Optimizer):
    """State of another shape than the parameter, replaced in every step, and more from step 3 on.

    Keeps a counter in its groups as well, as some optimizers outside of torch do.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                norm = p.grad.square() if p.ndim < 2 else p.grad.square().sum(1, keepdim=True)
                state["norm"] = norm + 0.9 * state.get("norm", 0.0)
                update = p.grad / (state["norm"].sqrt() + 1e-6)
                if group["count"] >= 3:
                    state["slow"] = 0.5 * state.get("slow", 0.0) + update
                    update = update + state["slow"]
                p.add_(update, alpha=-group["lr"] / group["count"])


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def sharded_toy(offload: Offload | None, recipe: Recipe = Recipe(), seed: int = 0) -> Model:
    torch.manual_seed(seed)
    model = Model()
    keywords: dict[str, Any] = {"plugins": [] if offload is None else [offload]}
    if recipe.bf16:
        keywords["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if recipe.hsdp:
        keywords["mesh"] = mesh_of((2, torch.distributed.get_world_size() // 2))
    if recipe.alone:
        keywords["mesh"] = mesh_of((torch.distributed.get_world_size(), 1))["shard"]
    for block in model.blocks:
        fully_shard(block, **keywords)
    fully_shard(model, **keywords)
    return model


def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh(
        torch.get_default_device().type, shape, mesh_dim_names=("replicate", "shard")
    )


def wrapped(optimizer: torch.optim.Optimizer, offload: Offload | None) -> torch.optim.Optimizer:
    return optimizer if offload is None else offload.wrap(optimizer)


def tokens_for(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 31, (3, 7), generator=generator)


def train(
    model: Model,
    optimizer: torch.optim.Optimizer,
    rank: int,
    recipe: Recipe = Recipe(),
    steps: Sequence[int] | None = None,
) -> list[float]:
    """Losses and gradient norms, one after another."""
    scheduler = None
    if recipe.schedule:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.8)
    found: list[float] = []
    for step in steps if steps is not None else range(recipe.steps):
        for micro in range(recipe.micro_batches):
            last = micro == recipe.micro_batches - 1
            assert isinstance(model, FSDPModule)
            model.set_requires_gradient_sync(last or recipe.sync_every)
            loss = loss_of(model, tokens_for(step * 10 + micro, rank))
            loss.backward()
            found.append(loss.item())
        if recipe.clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            found.append(float(full(norm)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=not recipe.keep_gradients)
        if scheduler is not None:
            scheduler.step()
    return found


def without(
    rank: int, size: int, recipe: Recipe
) -> tuple[Model, torch.optim.Optimizer, list[float]]:
    """What training without offload gives. Only to be looked at.

    Kept for later tests, unless it is on a mesh of its own, whose groups end with the test.
    """
    del size  # another world is another process
    train_it = _without.__wrapped__ if recipe.hsdp or recipe.alone else _without
    return train_it(rank, recipe)


@functools.cache
def _without(rank: int, recipe: Recipe) -> tuple[Model, torch.optim.Optimizer, list[float]]:
    model = sharded_toy(None, recipe)
    optimizer = recipe.make_optimizer(model)
    return model, optimizer, train(model, optimizer, rank, recipe)


def on(path: str, optimizer: str = "disk", params: str = "device", **chosen: Any) -> Offload:
    disk = chosen.pop("disk", DiskSettings(path=Path(path)))
    return Offload(params=params, optimizer=optimizer, chunk_bytes=SMALL, disk=disk, **chosen)  # type: ignore[arg-type]


def same(one: Tensor, other: Tensor) -> bool:
    """The same bits; on CUDA nearly so, since a host's step rounds otherwise than the device's."""
    if torch.get_default_device().type == "cuda":
        return torch.allclose(one, other, rtol=1e-3, atol=1e-5)
    return torch.equal(one, other)


def values(model: nn.Module) -> dict[str, Tensor]:
    """Full parameters by name, copied to the host."""
    return {name: full(p.detach()).to("cpu", copy=True) for name, p in model.named_parameters()}


def assert_same_values(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(values(one).items(), values(other).values(), strict=True):
        assert same(a, b), name


def assert_same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    a, b = one.state_dict()["state"], other.state_dict()["state"]
    assert a.keys() == b.keys()
    for index in a:
        assert a[index].keys() == b[index].keys()
        for name, value in a[index].items():
            found = b[index][name]
            if isinstance(value, Tensor):
                assert type(value) is type(found)
                assert same(full(value).cpu(), full(found).cpu()), (index, name)
            else:
                assert value == found


def same_as_without(rank: int, size: int, offload: Offload, recipe: Recipe) -> None:
    """Losses, parameters and optimizer state are those of the same training without offload."""
    plain, expected_optimizer, expected = without(rank, size, recipe)
    model = sharded_toy(offload, recipe)
    optimizer = wrapped(recipe.make_optimizer(model), offload)
    losses = train(model, optimizer, rank, recipe)
    found, wanted = (torch.tensor(each, dtype=torch.float64) for each in (losses, expected))
    assert same(found, wanted)
    assert_same_values(model, plain)
    assert_same_state(optimizer, expected_optimizer)
