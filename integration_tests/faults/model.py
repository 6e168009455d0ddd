"""A small model that fails on demand, again and again, in the same processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from toy_codecs import BytesGather

from polyshard import Observer, Plugin, fully_shard, hookimpl
from polyshard.failures import Part
from polyshard.plugins.seams import GatherCodec, GroupInfo

WIDTH, LAYERS = 16, 5
FIRST = 1
"""Layers from here on fail: until then no rank can have ended its backward."""
PLACES = ("forward", "backward", "codec", "observer", "optimizer")


class Purpose(ArithmeticError):  # noqa: N818  (an injected one)
    """Raised on purpose."""


@dataclass(frozen=True)
class Injection:
    """One failure: of this rank, in this place of this layer."""

    rank: int
    place: str
    layer: int

    @classmethod
    def draw(cls, seed: int, number: int, size: int, places: tuple[str, ...]) -> Injection:
        """The same on every rank."""
        source = random.Random(f"{seed} {number}")
        return cls(source.randrange(size), source.choice(places), source.randrange(FIRST, LAYERS))


class Trap:
    """Raises once, where it was set."""

    def __init__(self, moment: Callable[[], None]) -> None:
        """``moment`` is called just before."""
        self._moment = moment
        self._set: tuple[str, str] | None = None

    def set(self, place: str, layer: object) -> None:
        """Raise when this is passed."""
        self._set = (place, str(layer))

    def clear(self) -> None:
        """Let everything pass."""
        self._set = None

    def at(self, place: str, layer: object) -> None:
        """``place`` of ``layer`` is passed."""
        if self._set == (place, str(layer)):
            self._set = None
            self._moment()
            raise Purpose("on purpose")


class _Layer(nn.Module):
    def __init__(self, index: int, trap: Trap) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self._index, self._trap = index, trap

    def forward(self, x: Tensor) -> Tensor:
        self._trap.at("forward", self._index)
        y: Tensor = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda _: self._trap.at("backward", self._index))
        return y.tanh()


class _Codec(BytesGather):
    def __init__(self, layout: Any, trap: Trap, name: str) -> None:
        super().__init__(layout)
        self._at = (trap, name)

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        trap, name = self._at
        trap.at("codec", name)
        super().encode(shard, payload)


class _Watcher(Observer):
    def __init__(self, trap: Trap) -> None:
        self._trap = trap

    def on_unsharded(self, group: str, wait_seconds: float) -> None:
        self._trap.at("observer", group)


class _Trapped(Plugin, GatherCodec):
    name = "trapped"
    settings = ""

    def __init__(self, trap: Trap) -> None:
        self.trap = trap

    @hookimpl
    def polyshard_observer(self, group: GroupInfo) -> Observer:
        return _Watcher(self.trap)

    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> Any:
        return self

    def bind(self, group: GroupInfo, layout: Any) -> BytesGather:
        return _Codec(layout, self.trap, str(group.identity))


class Training:
    """A model, its optimizer and the trap."""

    def __init__(self, moment: Callable[[], None]) -> None:
        """The same on all ranks; ``moment`` is called when this one is about to fail."""
        torch.manual_seed(0)
        self.trap = Trap(moment)
        layers: Any = nn.Sequential(*(_Layer(index, self.trap) for index in range(LAYERS)))
        plugins = [_Trapped(self.trap)]
        for layer in layers:
            fully_shard(layer, plugins=plugins, reshard_after_forward=True)
        self.model: Any = fully_shard(layers, plugins=plugins)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, index: int) -> float:
        """Of training on the same batch on every rank."""
        loss = self._loss(index)
        loss.backward()
        with Part("the optimizer's step"):
            self.trap.at("optimizer", "")
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def evaluate(self) -> float:
        """Without gradients."""
        self.model.eval()
        with torch.no_grad():
            loss = float(self._loss(-1))
        self.model.train()
        return loss

    def recover(self) -> None:
        """Forget the step that was lost."""
        self.trap.clear()
        self.model.reset_iter_state()
        self.optimizer.zero_grad()

    def prepare(self, injection: Injection) -> None:
        """On the rank that is to fail."""
        layer = "" if injection.place == "optimizer" else injection.layer
        self.trap.set(injection.place, layer)

    def _loss(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index + 1)
        loss: Tensor = self.model(torch.randn(4, WIDTH, generator=generator)).square().mean()
        return loss
