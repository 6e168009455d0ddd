"""Optimizer steps alone: flat against FSDP2's, on the same sharded parameters, taking turns.

    python -m benchmarks optimizer

One process, gloo, one thread. *Host* is 1,000 parameters of 64 elements in 40 groups, where
arithmetic is nothing; *large* is 16 matrices of 1024 x 1024 in as many groups. Gradients are those
of one backward, and stay. Reported are medians and their ratios; AdamW in every setting torch has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.optim import AdamW

import polyshard
import polyshard_optimizers
from benchmarks import harness
from benchmarks.harness import Found, Layer, median_of, run_ranks, sharded, time_steps

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
BARS = {
    "host, flat fused / FSDP2's best": 0.05,
    "large, flat fused / FSDP2 default": 0.35,
    "large, flat fused / FSDP2 fused": 1.05,
}


@dataclass(frozen=True)
class Case(harness.Case, host=(4, 5, 64), large=(2, 1, 1 << 10), turns=2):
    """What is measured."""

    host: tuple[int, ...] = (40, 25, 64)
    """Units, parameters of each, and elements of a parameter on a rank."""
    large: tuple[int, ...] = (16, 1, 1 << 20)
    turns: int = 15

    def measure(self) -> Found:
        """Medians and ratios."""
        sizes = {"host": self.host, "large": self.large}
        found = {name: run_ranks(1, _time, size, self.turns) for name, size in sizes.items()}
        host, large = found["host"], found["large"]
        ratios = (
            host["flat fused"] / min(host[f"FSDP2 {setting}"] for setting in SETTINGS),
            large["flat fused"] / large["FSDP2 default"],
            large["flat fused"] / large["FSDP2 fused"],
        )
        return {
            "seconds": found,
            "ratios": dict(zip(BARS, ratios, strict=True)),
            "flat / FSDP2, same setting": {
                name: {s: of[f"flat {s}"] / of[f"FSDP2 {s}"] for s in SETTINGS}
                for name, of in found.items()
            },
        }


def _trained(size: tuple[int, ...], engine: str, setting: str) -> tuple[nn.Module, AdamW]:
    """A sharded model with gradients, and its optimizer. ``engine`` is ``flat`` or ``FSDP2``."""
    torch.manual_seed(0)
    layers = [Layer(*size[1:]) for _ in range(size[0])]
    fully_shard: Any = polyshard.fully_shard if engine == "flat" else torch_fully_shard
    model = sharded(nn.Sequential(*layers), layers, fully_shard)
    optimizer = AdamW(model.parameters(), **SETTINGS[setting])
    if engine == "flat":
        polyshard_optimizers.flat(optimizer)
    model(torch.zeros(())).backward()
    return model, optimizer


def _time(size: tuple[int, ...], turns: int) -> dict[str, float]:
    """Median seconds of a step, by engine and setting; weights have to be the same bits."""
    made = {f"{e} {s}": _trained(size, e, s) for e in ("flat", "FSDP2") for s in SETTINGS}
    found = time_steps({name: each.step for name, (_, each) in made.items()}, turns, warmup=3)
    for setting in SETTINGS:
        pair = (made[f"{e} {setting}"][0].parameters() for e in ("flat", "FSDP2"))
        for one, other in zip(*pair, strict=True):
            assert torch.equal(one.to_local(), other.to_local()), setting
    return median_of(found)
