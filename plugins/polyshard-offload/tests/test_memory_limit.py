"""The demo model trains within a limit on the process that its resident state exceeds four times.

The limit is ``RLIMIT_DATA``: since Linux 4.7 the kernel counts every private writable mapping
against it, heap and anonymous memory, touched or not. Shared mappings of files are not counted:
windows on the disk tier are page cache, which the kernel takes back when it needs it.
(``RLIMIT_AS`` would count them, and reserved addresses, which are no memory; nothing limits the
resident size of a process.) Stacks of threads count in full, so they are small here. Two thirds
of the limit are used; holes in malloc's heap, which differ from run to run, take of the rest.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polyshard import fully_shard
from polyshard_demo.model import (
    Block,
    Embedding,
    LanguageModel,
    ModelSettings,
    Projection,
)
from polyshard_offload import DiskSettings, Offload
from polyshard_testing import World

MIB = 1 << 20
STEPS = 2  # the second one reads the state that the first one wrote
PATIENT_SECONDS = 240.0


def settings(layers: int) -> ModelSettings:
    return ModelSettings(width=256, layers=layers, heads=4, hidden=704, sequence=32)


LARGE = settings(layers=32)


def build(offload: Offload | None, shape: ModelSettings) -> LanguageModel:
    """The demo model, made and sharded block by block: no rank ever holds all of it."""
    torch.manual_seed(0)
    plugins = [] if offload is None else [offload]
    with torch.device("meta"):
        model = LanguageModel(shape)
    for index in range(shape.layers):
        model.blocks[index] = fully_shard(Block(shape), plugins=plugins)
    model.embedding = Embedding(shape.vocabulary, shape.width)
    model.norm = nn.RMSNorm(shape.width, eps=1e-6)
    model.head = Projection(shape.width, shape.vocabulary, 0.02)
    return fully_shard(model, plugins=plugins)


def resident_bytes(model: nn.Module) -> int:
    """Parameters, gradients and two moments of this rank, at rest."""
    return 4 * sum(p.to_local().nbytes for p in model.parameters())  # type: ignore[attr-defined]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[float]:
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        tokens = torch.randint(0, LARGE.vocabulary, (2, 33), generator=generator)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def everything_on_disk(path: str) -> Offload:
    disk = DiskSettings(path=Path(path), block_bytes=MIB)
    return Offload(
        params="disk", grads="disk", optimizer="disk", prefetch=1, chunk_bytes=4 * MIB, disk=disk
    )


def adamw(model: nn.Module, offload: Offload | None) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return made if offload is None else offload.wrap(made)


def data_bytes() -> int:
    """What the kernel holds against RLIMIT_DATA."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(text for text in status.splitlines() if text.startswith("VmData"))
    return int(line.split()[1]) * 1024


def unlimited(rank: int, size: int) -> tuple[list[float], int]:
    model = build(None, LARGE)
    return train(model, adamw(model, None), rank), resident_bytes(model)


@contextmanager
def limit(more_bytes: int) -> Iterator[None]:
    """Let this process have so much more than it has now."""
    infinity = resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + more_bytes, infinity))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (infinity, infinity))


def fits(rank: int, size: int, path: str, budget_bytes: int) -> list[float]:
    """Losses of a process that may have ``budget_bytes`` more than it had before the model."""
    threading.stack_size(MIB // 2)
    warm = everything_on_disk(path)
    model = build(warm, settings(layers=2))  # threads and kernels are there from now on
    train(model, adamw(model, warm), rank)
    del model
    offload = everything_on_disk(path)
    with limit(budget_bytes):
        model = build(offload, LARGE)
        return train(model, adamw(model, offload), rank)


def does_not_fit(rank: int, size: int, path: str, budget_bytes: int) -> str:
    """Without offload the parameters alone are too much: nothing is sent, no rank waits."""
    with limit(budget_bytes):
        try:
            build(None, LARGE)
        except (RuntimeError, MemoryError) as error:
            return str(error)
    return ""


@pytest.mark.thorough
@pytest.mark.slow
def test_state_four_times_the_budget_trains_within_it(spare_world: World, tmp_path: Path) -> None:
    (one, resident), (other, _) = spare_world.run(unlimited, timeout=PATIENT_SECONDS)
    budget = resident // 4
    assert spare_world.run(fits, str(tmp_path), budget, timeout=PATIENT_SECONDS) == [one, other]
    spare_world.close()  # processes that freed a model before would take its memory again
    texts = spare_world.run(does_not_fit, str(tmp_path), budget)
    assert all("alloc" in text for text in texts), texts
