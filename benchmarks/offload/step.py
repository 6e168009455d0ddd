"""Optimizer step and whole step per tier, in pairs with no offload.

    python -m benchmarks.offload.step DIRECTORY

One process, gloo, W = 1. Ratios are medians of runs that take turns; memory is as predicted.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.clock import seconds
from polyshard import fully_shard
from polyshard_offload import DiskSettings, Offload

CPU = torch.device("cpu")
Tiers = tuple[str, str, str]
TIERS: tuple[Tiers, ...] = (
    ("device", "device", "host"),
    ("device", "device", "disk"),
    ("host", "host", "host"),
    ("host", "host", "disk"),
    ("disk", "host", "disk"),
    ("disk", "disk", "disk"),
)


class Subject:
    """A stack of layers and its optimizer on some tiers; ``None`` is no offload."""

    def __init__(self, tiers: Tiers | None, disk: DiskSettings, width: int, layers: int) -> None:
        torch.manual_seed(0)
        self.offload = None
        if tiers is not None:
            params, grads, optimizer = tiers
            self.offload = Offload(  # type: ignore[call-overload, unused-ignore]
                params=params,  # type: ignore[arg-type]
                grads=grads,  # type: ignore[arg-type]
                optimizer=optimizer,  # type: ignore[arg-type]
                disk=disk,
                chunk_bytes=16 << 20,
            )
        plugins = [] if self.offload is None else [self.offload]
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        for layer in self.model:
            fully_shard(layer, plugins=plugins)
        fully_shard(self.model, plugins=plugins)
        made = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.optimizer = made if self.offload is None else self.offload.wrap(made)
        self.input = torch.randn(64, width)

    def backward(self) -> None:
        self.model(self.input).square().mean().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    disk = DiskSettings(path=chosen.directory)
    plain = Subject(None, disk, chosen.width, chosen.layers)
    count = sum(p.numel() for p in plain.model.parameters())
    print(f"{count / 1e6:.1f} M parameters, fused AdamW, {torch.get_num_threads()} thread(s)")
    print(f"{'params-grads-optimizer':<24} {'step ms':>8} {'x none':>7} {'whole x none':>13}")
    for tiers in TIERS:
        subject = Subject(tiers, disk, chosen.width, chosen.layers)
        rows: list[tuple[float, float, float, float]] = []
        for _ in range(chosen.repeats + 2):
            mine = seconds(subject.backward, CPU), seconds(subject.step, CPU)
            theirs = seconds(plain.backward, CPU), seconds(plain.step, CPU)
            rows.append((*mine, *theirs))
        steps = [row[1] for row in rows[2:]]
        ratio = statistics.median(row[1] / row[3] for row in rows[2:])
        whole = statistics.median((r[0] + r[1]) / (r[2] + r[3]) for r in rows[2:])
        step_ms = 1e3 * statistics.median(steps)
        print(f"{'-'.join(tiers):<24} {step_ms:>8.1f} {ratio:>7.1f} {whole:>13.1f}")
        assert subject.offload is not None
        print(f"    {subject.offload.memory(subject.optimizer)}")
        del subject


if __name__ == "__main__":
    main()
