"""Parameters that rest end to end, as shards do, and optimizers of every kind over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from polyshard.memory.own_storage import own_storage

Make = Callable[[Any], Optimizer]


def _make(name: str, **settings: Any) -> Make:
    return lambda params: getattr(optim, name)(params, **settings)


EVERY: dict[str, Make] = {
    "ASGD": _make("ASGD", weight_decay=0.1, t0=2),
    "ASGD foreach": _make("ASGD", foreach=True),
    "Adadelta": _make("Adadelta", maximize=True),
    "Adagrad": _make("Adagrad", weight_decay=0.1, lr_decay=0.1),
    "Adagrad fused": _make("Adagrad", fused=True),
    "Adam": _make("Adam", weight_decay=0.1),
    "Adam foreach": _make("Adam", foreach=True, amsgrad=True, weight_decay=0.1),
    "Adam fused": _make("Adam", fused=True, amsgrad=True, maximize=True),
    "Adam tensor lr": _make("Adam", lr=torch.tensor(1e-2)),
    "AdamW": _make("AdamW"),
    "AdamW foreach": _make("AdamW", foreach=True),
    "AdamW fused": _make("AdamW", fused=True),
    "AdamW without eps": _make("AdamW", eps=0.0),
    "Adamax": _make("Adamax", foreach=True),
    "NAdam": _make("NAdam", weight_decay=0.1),
    "NAdam foreach": _make("NAdam", foreach=True, decoupled_weight_decay=True),
    "RAdam": _make("RAdam"),
    "RMSprop": _make("RMSprop", momentum=0.9, centered=True, weight_decay=0.1),
    "RMSprop foreach": _make("RMSprop", foreach=True),
    "Rprop": _make("Rprop"),
    "Rprop foreach": _make("Rprop", foreach=True),
    "SGD": _make("SGD", lr=0.1),
    "SGD fused": _make("SGD", lr=0.1, fused=True, momentum=0.9, nesterov=True),
    "SGD momentum": _make("SGD", lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
}


def torch_steps(name: str, count: int, missing: set[tuple[int, int]]) -> bool:
    """Whether torch steps ``count`` parameters without gradients at ``missing`` (step, place).

    Fused SGD (torch 2.11 to 2.15) raises a TypeError in a step that has a gradient for a parameter
    with momentum and for one without any yet.
    """
    begun: set[int] = set()
    for index in range(2 + max((step for step, _ in missing), default=0)):
        given = {place for place in range(count) if (index, place) not in missing}
        if name == "SGD fused" and begun & given and given - begun:
            return False
        begun |= given
    return True


class Shelf:
    """Parameters of one buffer, ``gap`` elements apart, and gradients of another."""

    def __init__(
        self, sizes: Sequence[int], dtype: torch.dtype = torch.float32, gap: int = 0
    ) -> None:
        self.generator = torch.Generator().manual_seed(0)
        starts = [sum(sizes[:i]) + i * gap for i in range(len(sizes))]
        self._ranges = [(s, s + n) for s, n in zip(starts, sizes, strict=True)]
        self._dtype = dtype
        self.buffer = self._draw()
        self.params = [nn.Parameter(own_storage(self.buffer[a:b])) for a, b in self._ranges]

    def _draw(self) -> Tensor:
        numel = self._ranges[-1][1] + 8
        scale = 3.0 ** float(torch.randn((), generator=self.generator))
        drawn: Tensor = torch.randn(numel, generator=self.generator) * scale
        return drawn.to(self._dtype)

    def give_gradients(self) -> None:
        """Of new values, all in one new buffer."""
        gradients = self._draw()
        for parameter, (start, stop) in zip(self.params, self._ranges, strict=True):
            parameter.grad = gradients[start:stop]

    @property
    def padding(self) -> Tensor:
        """What lies between parameters."""
        kept = torch.ones(len(self.buffer), dtype=torch.bool)
        for start, stop in self._ranges:
            kept[start:stop] = False
        return self.buffer[kept]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal, and NaN where the other is."""
    as_bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = (t.detach().contiguous().view(as_bits[t.itemsize]) for t in (one, other))
    return torch.equal(one, other)


def runs_of(optimizer: Any) -> list[int]:
    """How many parameters each run of the last step had."""
    plan = optimizer._polyshard_flat.plan
    return sorted((len(run.members) for run in plan.runs), reverse=True)
