"""What the plugin says it takes is what it takes, and a limit on the process can be met."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from polyshard import fully_shard
from polyshard_offload import DiskSettings, Memory, Offload
from polyshard_testing import World

MIB = 1 << 20


def build(offload: Offload | None, layers: int, width: int) -> nn.Sequential:
    """Layer by layer, so that no rank ever holds the whole model."""
    torch.manual_seed(0)
    plugins = [] if offload is None else [offload]
    made = []
    for _ in range(layers):
        layer = nn.Linear(width, width, bias=False)
        with torch.no_grad():
            layer.weight.mul_(1.7)
        made.append(fully_shard(layer, plugins=plugins))
    model = nn.Sequential(*made)
    fully_shard(model, plugins=plugins)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> float:
    loss = model(torch.full((2, width), 0.1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def takes(rank: int, size: int, path: str, tiers: tuple[str, str, str]) -> tuple[Memory, Memory]:
    disk = DiskSettings(path=Path(path), block_bytes=MIB // 4)
    params, grads, optimizer_tier = tiers
    offload = Offload(
        params=params,  # type: ignore[arg-type]
        grads=grads,  # type: ignore[arg-type]
        optimizer=optimizer_tier,  # type: ignore[arg-type]
        chunk_bytes=4 * MIB,
        disk=disk,
    )
    model = build(offload, layers=8, width=1024)
    optimizer = offload.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    predicted = offload.memory(optimizer)
    for _ in range(3):
        step(model, optimizer, 1024)
    return predicted, offload.measured_memory(optimizer)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "tiers",
    [
        ("device", "device", "host"),
        ("device", "device", "disk"),
        ("host", "host", "host"),
        ("host", "disk", "disk"),
        ("disk", "disk", "disk"),
    ],
    ids="-".join,
)
def test_predictions_hold(world2: World, tmp_path: Path, tiers: tuple[str, str, str]) -> None:
    for predicted, measured in world2.run(takes, str(tmp_path), tiers):
        assert measured.bounce <= predicted.bounce, "aligned memory needs none"
        for name in ("staging", "buffers", "host", "disk"):
            said, found = getattr(predicted, name), getattr(measured, name)
            assert found == pytest.approx(said, rel=0.05, abs=3 * 4096), (name, said, found)
        assert "MiB" in str(predicted)


RESIDENT = """
import os, sys, torch
from polyshard_offload import Offload

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(l.split()[1]) * 1024 for l in lines if l.startswith("RssAnon"))

def measure(tier):
    params = [torch.nn.Parameter(torch.ones(1 << 20)) for _ in range(12)]
    for p in params:
        p.grad = torch.ones_like(p)
    before = anonymous()
    offload = Offload(optimizer=tier, chunk_bytes=8 << 20)
    optimizer = offload.wrap(torch.optim.AdamW(params, foreach=False))
    for _ in range(3):
        optimizer.step()
    said = offload.memory(optimizer)
    print(tier, anonymous() - before, said.host + said.buffers, flush=True)

torch.set_num_threads(1)
warm = [torch.nn.Parameter(torch.ones(8))]
warm[0].grad = torch.ones_like(warm[0])
torch.optim.AdamW(warm).step()
for tier in ("host", "disk"):
    if os.fork() == 0:  # a fresh heap for each, without importing torch again
        measure(tier)
        sys.exit()
    os.wait()
"""


@pytest.mark.thorough
def test_the_kernel_counts_the_same() -> None:
    """Resident anonymous memory of a process, before the optimizer had state and after."""
    command = [sys.executable, "-c", RESIDENT]
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = [line.split() for line in found.stdout.splitlines()]
    assert [tier for tier, _, _ in lines] == ["host", "disk"]
    for tier, measured, said in lines:
        assert int(measured) == pytest.approx(int(said), rel=0.05), tier
