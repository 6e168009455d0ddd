"""One small training run, on any ranks: what it leaves behind, bitwise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from polyshard import MixedPrecisionPolicy, fully_shard
from polyshard_reproducible import ReplicaGroups, Reproducible, SlotSampler, clip_grad_norm_

SLOTS = 8
BATCH = 3
WORDS = 31
WIDTH = 20  # 2.5 vector registers: rows, shards and biases end in the middle of one

if torch.get_default_device().type != "cpu":  # a rank of `pytest --device`: the plugin demands it
    torch.use_deterministic_algorithms(True)


class Block(nn.Module):
    """Odd sizes, a norm, and dropout twice."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.down(self.drop(nn.functional.gelu(self.up(self.norm(x))))))
        return x + out


class Words(nn.Module):
    """Predicts words: an embedding, blocks, and a head of another odd size."""

    def __init__(self, hidden: int = 37) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(hidden), Block(hidden)])
        self.head = nn.Linear(WIDTH, WORDS)
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, words: Tensor) -> Tensor:
        x: Tensor = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x) * self.scale
        return out


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """FSDP, or replicas of it."""
    return init_device_mesh(
        torch.get_default_device().type, shape, mesh_dim_names=("replicas", "shards")[-len(shape) :]
    )


def samples() -> Tensor:
    """A data set: rows of words."""
    return torch.randint(WORDS, (100, 7), generator=torch.Generator().manual_seed(5))


def make_model(
    mesh: DeviceMesh, shard: Callable[..., Any], make: Callable[[], Any] = Words, **given: Any
) -> Any:
    """The model, from the same values everywhere."""
    torch.manual_seed(0)
    model = make()
    for block in model.blocks:
        shard(block, mesh=mesh, **given)
    shard(model, mesh=mesh, **given)
    return model


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    """The next word of each row, averaged."""
    out = model(words[:, :-1])
    return nn.functional.cross_entropy(out.flatten(0, 1), words[:, 1:].flatten())


class Run:
    """Training with the plugin, on a mesh or on one of a ``shape``."""

    def __init__(
        self,
        shape: tuple[int, ...] | DeviceMesh,
        optimizer: Callable[..., Any] = torch.optim.AdamW,
        *,
        slots: int = SLOTS,
        dtype: torch.dtype | None = None,
        beside: Sequence[object] = (),
        **given: Any,
    ) -> None:
        policy = MixedPrecisionPolicy(dtype, torch.float32)
        self.plugin = Reproducible(slots=slots, seed=3)
        mesh = mesh_of(shape) if isinstance(shape, tuple) else shape
        plugins = [*beside, self.plugin]
        self.model = make_model(mesh, fully_shard, plugins=plugins, mp_policy=policy, **given)
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.sampler = SlotSampler(100, BATCH, slots, seed=1)
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.after_backward: Callable[[int], None] = lambda step: None
        self.factors: dict[tuple[int, int], float] = {}
        """Of losses, by step and slot: what is not finite, say."""
        self.replicas: Callable[[int], ReplicaGroups | None] = lambda step: None

    def train(self, steps: range, max_norm: float = 0.5) -> Run:
        """Make these steps."""
        data = samples()
        for step in steps:
            losses, others = [], self.replicas(step)
            for slot in self.plugin.each_slot(self.model, step=step, replicas=others):
                words = data[self.sampler.indices(step, slot)]
                losses.append(loss_of(self.model, words) * self.factors.get((step, slot), 1.0))
                losses[-1].backward()
                self.after_backward(step)
            self.losses.append(self.plugin.mean(self.model, losses, replicas=others))
            self.norms.append(clip_grad_norm_(self.model.parameters(), max_norm))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def state(self) -> dict[str, str]:
        """Digests of everything: see :func:`digests`."""
        return digests(self.model, self.optimizer, self.losses + self.norms)


def digests(model: nn.Module, optimizer: Any, values: list[Tensor]) -> dict[str, str]:
    """Of weights and optimizer state, whole, and of ``values``; all ranks call it."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = digest(parameter)
        for key, value in sorted(optimizer.state[parameter].items()):
            found[f"{name}.{key}"] = digest(value)
    for index, value in enumerate(values):
        found[f"value {index}"] = digest(value)
    return found


def digest(value: Tensor) -> str:
    """Of the bits of all of it."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    raw = whole.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Names of what is not the same."""
    assert one.keys() == other.keys()
    return [name for name in one if one[name] != other[name]]
