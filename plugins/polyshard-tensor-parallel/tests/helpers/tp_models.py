"""Models, batches and a training loop, and the same in one process as the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from polyshard import clip_grad_norm_, fully_shard
from polyshard.errors import SettingError
from polyshard_demo.model import LanguageModel, ModelSettings
from polyshard_tensor_parallel import Plan
from polyshard_tensor_parallel.plans.checking import check

SEQUENCE = 16


def tiny(*, tied: bool = False, seed: int = 0, width: int = 32) -> LanguageModel:
    """The demonstration model, small; the same values everywhere."""
    torch.manual_seed(seed)
    settings = ModelSettings(
        width=width, layers=2, heads=4, hidden=60, sequence=SEQUENCE, tied=tied
    )
    return LanguageModel(settings)


class Mlp(nn.Module):
    """Two layers with biases and a norm; ``hidden`` need not divide by anything."""

    def __init__(self, width: int = 10, hidden: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


def mlp(seed: int = 0, **kwargs: int) -> Mlp:
    torch.manual_seed(seed)
    return Mlp(**kwargs)


def mlp_plan() -> dict[str, ParallelStyle]:
    return {"up": ColwiseParallel(), "down": RowwiseParallel()}


def meshes(dp: int, tp: int, replicas: int = 0) -> DeviceMesh:
    """("dp", "tp"), or ("replicas", "dp", "tp")."""
    if replicas:
        names = ("replicas", "dp", "tp")
        return init_device_mesh(
            torch.get_default_device().type, (replicas, dp, tp), mesh_dim_names=names
        )
    return init_device_mesh(torch.get_default_device().type, (dp, tp), mesh_dim_names=("dp", "tp"))


def tokens_for(step: int, part: int, count: int = 2) -> Tensor:
    """Batch of data-parallel rank ``part`` at ``step``."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    return torch.randint(0, 256, (count, SEQUENCE + 1), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def shard_blocks(model: nn.Module, **kwargs: Any) -> Any:
    blocks: Any = model.blocks
    for block in blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


class Curve(NamedTuple):
    """What a training shows: loss and gradient norm of each step."""

    losses: list[float]
    norms: list[float]


def train(
    model: nn.Module,
    parts: Sequence[int],
    steps: int,
    *,
    lr: float = 1e-2,
    micro: int = 1,
    clip: float = 1.0,
    loss: Callable[[nn.Module, Tensor], Tensor] = loss_of,
    momentum: bool = False,
) -> Curve:
    """AdamW (or SGD) on the batches of ``parts``; several parts are averaged, as ranks would be."""
    chosen: Any = torch.optim.SGD if momentum else torch.optim.AdamW
    optimizer = chosen(model.parameters(), lr=lr)
    set_sync: Any = getattr(model, "set_requires_gradient_sync", None)
    curve = Curve([], [])
    for step in range(steps):
        total = 0.0
        for index in range(micro):
            if set_sync is not None:
                set_sync(index == micro - 1)
            for part in parts:
                value = loss(model, tokens_for(step * micro + index, part))
                (value / (len(parts) * micro)).backward()
                total += value.item() / (len(parts) * micro)
        curve.norms.append(clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        curve.losses.append(total)
    return curve


def mean_over(values: Iterable[list[float]]) -> list[float]:
    """Mean of the curves of different data-parallel ranks."""
    return [sum(column) / len(column) for column in zip(*values, strict=True)]


def problems_of(plan: Any, model: nn.Module, world_size: int = 2) -> str:
    with pytest.raises(SettingError) as caught:
        check(plan if isinstance(plan, Plan) else Plan(plan), model, world_size)
    return str(caught.value)
