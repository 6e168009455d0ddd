"""Muon steps over shards, in three ways: on owners, on every rank, and on owners after a detour.

    python -m benchmarks.matrix --width 1024 --layers 4 --ranks 4
    python -m benchmarks.matrix --width 1024 --layers 4 --ranks 4 --blocks 8

- *owner*: polyshard-optimizers; gradients land whole on their owners, updates return by rows in
  bf16.
- *every rank*: ``full_tensor`` of every gradient's momentum on all ranks, each computing all.
- *detour*: gradients are reduced to shards, gathered to their owners, and updates scattered back,
  in fp32.

With ``--blocks`` each layer is so many matrices of rows, such as heads. If ranks divide them, the
owner's way leaves them in rows.

The ways take turns on the same ranks and data. A *Muon step* is what follows the backward; the
whole step is timed too, since on the owners' way gradients travel otherwise in it. Bytes are those
that leave a rank, on average, for gradients and updates; parameters are gathered alike in all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

import polyshard
from benchmarks.harness import Found, command, in_turns, run_ranks, sharded
from polyshard_optimizers import MatrixOptimizer

SETTINGS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
COEFFICIENTS, NS_STEPS, EPS, MOMENTUM = (3.4445, -4.7750, 2.0315), 5, 1e-7, 0.95


@dataclass(frozen=True)
class Case:
    """A stack of square layers, and how often it is stepped."""

    width: int = 1024
    layers: int = 4
    tokens: int = 16
    ranks: int = 2
    blocks: int = 1
    steps: int = 7
    warmup: int = 1

    @property
    def in_rows(self) -> bool:
        """Whether every rank's shard is whole matrices, which nothing has to move then."""
        return self.blocks > 1 and self.blocks % self.ranks == 0

    def quick(self) -> Case:
        """Small and short."""
        return replace(self, width=128, layers=4, steps=2)


def build(case: Case, plugins: list[Any]) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(case.width, case.width, bias=False) for _ in range(case.layers)]
    mesh = init_device_mesh("cpu", (case.ranks,))
    keywords: dict[str, Any] = {"mesh": mesh, "plugins": plugins}
    model: nn.Sequential = sharded(
        nn.Sequential(*layers), layers, polyshard.fully_shard, **keywords
    )
    return model


class Owner:
    """The plugin."""

    def __init__(self, case: Case, *, early: bool = False) -> None:
        count = case.blocks
        plugin = MatrixOptimizer(
            torch.optim.Muon, blocks=lambda name, shape: count, early=early, **SETTINGS
        )
        self.model = build(case, [plugin])
        self._muon = plugin.optimizer(self.model)

    def step(self) -> None:
        self._muon.step()

    def bytes_of_step(self, case: Case) -> float:
        """On average: whole gradients from all ranks but one, bf16 rows to all ranks but one."""
        others, numel = case.ranks - 1, case.layers * case.width**2
        gradients = others / case.ranks * numel * 4
        return gradients if case.in_rows else gradients + others / case.ranks**2 * numel * 2


class EveryRank:
    """What ``torch.optim.Muon`` takes where nobody owns anything: ``full_tensor`` everywhere."""

    def __init__(self, case: Case) -> None:
        self.model = build(case, [])
        self._blocks = case.blocks
        self._buffers: dict[Tensor, Tensor] = {}

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                update = self._momentum(parameter)
                whole = cast("DTensor", update).full_tensor()
                self._apply(parameter, orthogonal(whole, self._blocks))

    def _momentum(self, parameter: Tensor) -> Tensor:
        """Elementwise, on shards."""
        gradient = parameter.grad
        assert gradient is not None
        if parameter not in self._buffers:
            self._buffers[parameter] = torch.zeros_like(gradient)
        buffer = self._buffers[parameter]
        buffer.lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(buffer, MOMENTUM)

    def _apply(self, parameter: Tensor, whole: Tensor) -> None:
        local = cast("DTensor", parameter).to_local()
        rows = whole.chunk(dist.get_world_size())[dist.get_rank()]
        change(local, rows, whole.shape[0] // self._blocks)

    def bytes_of_step(self, case: Case) -> float:
        """A reduce-scatter and an all-gather, in fp32."""
        return 2 * (case.ranks - 1) / case.ranks * case.layers * case.width**2 * 4


class Detour(EveryRank):
    """Shards first, then owners, then back."""

    def step(self) -> None:
        size = dist.get_world_size()
        with torch.no_grad():
            parameters = list(self.model.parameters())
            for start in range(0, len(parameters), size):
                together = list(enumerate(parameters[start : start + size]))
                wholes = [self._gathered(owner, p) for owner, p in together]
                made = [
                    orthogonal(w, self._blocks).float() if w is not None else None for w in wholes
                ]
                for (owner, parameter), update in zip(together, made, strict=True):
                    local = cast("DTensor", parameter).to_local()
                    rows = torch.empty_like(local)
                    parts = None if update is None else list(update.chunk(size))
                    dist.scatter(rows, parts, src=owner)
                    change(local, rows, parameter.shape[0] // self._blocks)

    def _gathered(self, owner: int, parameter: Tensor) -> Tensor | None:
        local = cast("DTensor", self._momentum(parameter)).to_local()
        mine = owner == dist.get_rank()
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())] if mine else None
        dist.gather(local, parts, dst=owner)
        return torch.cat(parts) if parts is not None else None

    def bytes_of_step(self, case: Case) -> float:
        """A reduce-scatter, and a gather and a scatter by one rank in so many."""
        share = (case.ranks - 1) / case.ranks * case.layers * case.width**2 * 4
        return share * (1 + 2 / case.ranks)


def orthogonal(update: Tensor, blocks: int) -> Tensor:
    made = [
        _zeropower_via_newtonschulz(part, COEFFICIENTS, NS_STEPS, EPS)
        for part in update.chunk(blocks)
    ]
    return torch.cat(made) if blocks > 1 else made[0]


def change(local: Tensor, rows: Tensor, height: int) -> None:
    """``height`` is that of a matrix."""
    lr = _adjust_lr(SETTINGS["lr"], None, torch.Size((height, local.shape[1])))
    local.mul_(1 - SETTINGS["lr"] * SETTINGS["weight_decay"])
    local.add_(rows, alpha=-lr)


def early(case: Case) -> Owner:
    return Owner(case, early=True)


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


WAYS: dict[str, Callable[[Case], Any]] = {
    "owner": Owner, "owner, early": early, "every rank": EveryRank, "detour": Detour
}  # fmt: skip


def time_ways(case: Case) -> Found:
    """Seconds by way, and the weights that came out of each."""
    left_out = {"owner, early"} if case.in_rows else set()  # nothing of it begins early
    ways = {name: make(case) for name, make in WAYS.items() if name not in left_out}
    turns = {name: _turn(way, case) for name, way in ways.items()}
    seconds = in_turns(turns, case.steps, case.warmup)
    weights = {n: [p.detach().full_tensor() for p in w.model.parameters()] for n, w in ways.items()}
    return {
        "seconds": seconds,
        "differences": {n: _largest(w, weights["every rank"]) for n, w in weights.items()},
        "bytes": {n: w.bytes_of_step(case) for n, w in ways.items()},
        "engine_bytes": {n: polyshard.stats(w.model).bytes_sent for n, w in ways.items()},
    }


def _turn(way: Any, case: Case) -> Callable[[int], tuple[float, float]]:
    """Seconds of the Muon step, and of the whole one."""

    def turn(number: int) -> tuple[float, float]:
        generator = torch.Generator().manual_seed(number * 64 + dist.get_rank())
        batch = torch.randn(case.tokens, case.width, generator=generator)
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

    return turn


def _largest(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def measure(case: Case) -> Found:
    """Medians and the ratios the bars are about."""
    found = run_ranks(case.ranks, time_ways, case)
    medians = {
        name: {"muon": median(t[0] for t in turns), "step": median(t[1] for t in turns)}
        for name, turns in found["seconds"].items()
    }
    sent = found["bytes"]
    ratios = {
        f"{phase}: {way} / {other}": medians[way][phase] / medians[other][phase]
        for phase in ("muon", "step")
        for way in medians
        if way.startswith("owner")
        for other in ("every rank", "detour")
    }
    ratios |= {f"bytes: owner / {o}": sent["owner"] / sent[o] for o in ("every rank", "detour")}
    return {"case": asdict(case), "median_seconds": medians, "ratios": ratios, **found}


if __name__ == "__main__":
    command(measure, Case(), __doc__)
