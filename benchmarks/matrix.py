"""Muon steps over shards, in three ways: on owners, on every rank, and on owners after a detour.

    python -m benchmarks matrix --width 1024 --layers 4 --ranks 4

- *owner*: polyshard-optimizers; gradients land whole on their owners, updates return by rows in
  bf16.
- *every rank*: ``full_tensor`` of every gradient's momentum on all ranks, each computing all.
- *detour*: gradients are reduced to shards, gathered to their owners, and updates scattered back,
  in fp32.

The ways take turns on the same ranks and data. A *Muon step* is what follows the backward; the
whole step is timed too, since on the owners' way gradients travel otherwise in it. Bytes are those
that leave a rank, on average, for gradients and updates; parameters are gathered alike in all.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from benchmarks.harness import Found, OnRanks, in_turns, linear_model
from polyshard_optimizers import MatrixOptimizer

SETTINGS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
COEFFICIENTS, NS_STEPS, EPS, MOMENTUM = (3.4445, -4.7750, 2.0315), 5, 1e-7, 0.95
BARS = {
    2: {"muon: owner / every rank": 0.55, "bytes: owner / detour": 0.70},
    4: {
        "muon: owner / every rank": 0.30,
        "bytes: owner / every rank": 0.60,
        "bytes: owner / detour": 0.70,
    },
}
"""By ranks. Of ``N`` elements a rank sends ``4N(W-1)/W`` bytes of gradients in every way, in fp32,
and the detour sends ``8N(W-1)/W²`` beside. So no way is below ``W/(W+2)`` of the detour: 0.50 on 2
ranks, 0.67 on 4. With updates in bf16 the owner's way is at ``(2W+1)/(2W+4)``: 0.625, 0.75."""


def sent_beside(way: str, ranks: int) -> float:
    """Bytes sent beside the gradients' reduction, over its bytes and the number of ranks."""
    return {"every rank": float(ranks), "detour": 2.0}.get(way, 0.5)


class Owner:
    """The plugin."""

    def __init__(self, case: Case, *, early: bool = False) -> None:
        plugin = MatrixOptimizer(torch.optim.Muon, early=early, **SETTINGS)
        self.model = linear_model(case.width, case.layers, bias=False, plugins=[plugin])
        self.step: Any = plugin.optimizer(self.model).step


class Detour:
    """Shards first, then owners, then back."""

    def __init__(self, case: Case) -> None:
        self.model = linear_model(case.width, case.layers, bias=False)
        self._buffers: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        size = dist.get_world_size()
        parameters = list(self.model.parameters())
        for start in range(0, len(parameters), size):
            together = list(enumerate(parameters[start : start + size]))
            wholes = [self._gathered(owner, p) for owner, p in together]
            made = [orthogonal(whole) if whole is not None else None for whole in wholes]
            for (owner, parameter), update in zip(together, made, strict=True):
                rows = torch.empty_like(cast("DTensor", parameter).to_local())
                dist.scatter(rows, None if update is None else list(update.chunk(size)), src=owner)
                change(parameter, rows)

    def momentum(self, parameter: Tensor) -> DTensor:
        """Elementwise, on shards."""
        gradient = parameter.grad
        assert gradient is not None
        buffer = self._buffers.setdefault(parameter, torch.zeros_like(gradient))
        buffer.lerp_(gradient, 1 - MOMENTUM)
        return cast("DTensor", gradient.lerp(buffer, MOMENTUM))

    def _gathered(self, owner: int, parameter: Tensor) -> Tensor | None:
        local = self.momentum(parameter).to_local()
        mine = owner == dist.get_rank()
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())] if mine else None
        dist.gather(local, parts, dst=owner)
        return torch.cat(parts) if parts is not None else None


class EveryRank(Detour):
    """What ``torch.optim.Muon`` takes where no rank owns anything: ``full_tensor`` everywhere."""

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.model.parameters():
            whole = orthogonal(self.momentum(parameter).full_tensor())
            change(parameter, whole.chunk(dist.get_world_size())[dist.get_rank()])


def orthogonal(update: Tensor) -> Tensor:
    return _zeropower_via_newtonschulz(update, COEFFICIENTS, NS_STEPS, EPS).float()


def change(parameter: Tensor, rows: Tensor) -> None:
    """Apply this rank's rows of an update."""
    local = cast("DTensor", parameter).to_local()
    local.mul_(1 - SETTINGS["lr"] * SETTINGS["weight_decay"])
    local.add_(rows, alpha=-_adjust_lr(SETTINGS["lr"], None, parameter.shape))


@dataclass(frozen=True)
class Case(OnRanks, width=128, steps=2):
    """A stack of square layers, and how often it is stepped."""

    width: int = 1024
    layers: int = 4
    tokens: int = 16
    steps: int = 7

    def measure(self) -> Found:
        """Medians and the ratios the bars are about."""
        found = super().measure()
        medians = {
            name: {"muon": median(t[0] for t in turns), "step": median(t[1] for t in turns)}
            for name, turns in found["seconds"].items()
        }
        ratios = {
            f"{phase}: {way} / {other}": medians[way][phase] / medians[other][phase]
            for phase in ("muon", "step")
            for way in ("owner", "owner, early")
            for other in ("every rank", "detour")
        }
        sent = found["bytes"]
        ratios |= {f"bytes: owner / {o}": sent["owner"] / sent[o] for o in ("every rank", "detour")}
        return {"case": asdict(self), "median_seconds": medians, "ratios": ratios, **found}

    def on_rank(self) -> Found:
        """Seconds by way, and how far the weights that came out are from each other."""
        ways: dict[str, Any] = {
            "owner": Owner(self),
            "owner, early": Owner(self, early=True),
            "every rank": EveryRank(self),
            "detour": Detour(self),
        }
        turns = {name: partial(self._turn, way) for name, way in ways.items()}
        seconds = in_turns(turns, self.steps)
        weights = {
            name: torch.cat([p.detach().full_tensor() for p in way.model.parameters()])
            for name, way in ways.items()
        }
        # A reduce-scatter in fp32 in all ways.
        reduced = (self.ranks - 1) / self.ranks * self.layers * self.width**2 * 4
        return {
            "seconds": seconds,
            "differences": {
                name: float((each - weights["every rank"]).abs().max())
                for name, each in weights.items()
            },
            "bytes": {n: reduced * (1 + sent_beside(n, self.ranks) / self.ranks) for n in ways},
        }

    def _turn(self, way: Any, number: int) -> tuple[float, float]:
        """Seconds of the Muon step, and of the whole one."""
        generator = torch.Generator().manual_seed(number * 64 + dist.get_rank())
        batch = torch.randn(self.tokens, self.width, generator=generator)
        way.model.zero_grad()
        dist.barrier()
        begin = time.perf_counter()
        way.model(batch).square().mean().backward()
        dist.barrier()
        between = time.perf_counter()
        way.step()
        dist.barrier()
        end = time.perf_counter()
        return end - between, end - begin
