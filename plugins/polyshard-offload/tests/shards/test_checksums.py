"""Checksums of parameters and gradients on disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polyshard import fully_shard
from polyshard_offload import CorruptedError, DiskSettings, Offload
from polyshard_offload.tiers.block_io import Calls
from polyshard_testing import World


def made(path: str, *, checksums: bool = True, calls: Calls | None = None) -> tuple[Any, Any, Any]:
    disk = DiskSettings(path=Path(path), checksums=checksums)
    offload = Offload(params="disk", grads="disk", optimizer="disk", disk=disk)
    if calls is not None:
        offload.tiers.calls = calls
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for layer in model:
        fully_shard(layer, plugins=[offload])
    fully_shard(model, plugins=[offload])
    return model, offload.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2)), offload


def step(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, 64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def spoil(offload: Offload, value: int) -> None:
    """Change the first page of what the parameters' file holds, behind everybody's back."""
    page = torch.full((4096,), value, dtype=torch.uint8, device="cpu")
    offload.tiers.files["parameters"].write(4096, page)


def a_parameter_changes(rank: int, size: int, path: str) -> None:
    """Found by the next gather; without checksums it is not noticed."""
    model, optimizer, offload = made(path)
    step(model, optimizer)
    step(model, optimizer)
    spoil(offload, 7)
    with pytest.raises(CorruptedError, match="rank 0: parameters at byte 4096"):
        model(torch.ones(2, 64))
    model, optimizer, offload = made(path, checksums=False)
    step(model, optimizer)
    spoil(offload, 7)
    model(torch.ones(2, 64))


def a_parameter_changes_before_a_step(rank: int, size: int, path: str) -> None:
    model, optimizer, offload = made(path)
    step(model, optimizer)
    model(torch.ones(2, 64)).square().sum().backward()
    spoil(offload, 9)
    with pytest.raises(CorruptedError, match="rank 0: parameters at byte 4096"):
        optimizer.step()


def loading_mends(rank: int, size: int, path: str) -> None:
    """What a load writes is right by definition; the next step knows it."""
    model, optimizer, offload = made(path)
    step(model, optimizer)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    spoil(offload, 3)
    model.load_state_dict(saved)
    step(model, optimizer)
    step(model, optimizer)
    spoil(offload, 5)
    with pytest.raises(CorruptedError, match="parameters at byte 4096"):
        model(torch.ones(2, 64))


def nobody_steps_it(rank: int, size: int, path: str) -> None:
    """Frozen, or stepped by an optimizer that was not wrapped: found as well, and by evaluation.

    Before the first gather, and after a write that everybody may make.
    """
    for gathers_first in (False, True):
        model, _, offload = made(path)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        if gathers_first:
            model(torch.ones(2, 64))
            with torch.no_grad():
                model[0].weight.mul_(2)
            model(torch.ones(2, 64))
        spoil(offload, 7)
        with pytest.raises(CorruptedError, match="rank 0: parameters at byte 4096"):
            model(torch.ones(2, 64))
        model.reset_iter_state()
    model, _, offload = made(path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        step(model, optimizer)
    model(torch.ones(2, 64))
    spoil(offload, 8)
    with pytest.raises(CorruptedError, match="rank 0: parameters at byte 4096"):
        model(torch.ones(2, 64))


def a_write_goes_wrong(rank: int, size: int, path: str) -> None:
    """The disk says it has written a gradient, and has written something else."""
    wrong = [False]

    def write(descriptor: int, memories: Sequence[memoryview], offset: int) -> int:
        if wrong[0] and offset >= 4096:
            memories = [memoryview(bytearray(len(memories[0])))]
        return os.pwritev(descriptor, memories, offset)

    model, optimizer, _ = made(path, calls=Calls(pwritev=write))
    step(model, optimizer)
    wrong[0] = True
    with pytest.raises(CorruptedError, match="rank 0: gradients at byte"):
        model(torch.ones(2, 64)).square().sum().backward()
    model.reset_iter_state()


CASES = [
    a_parameter_changes,
    a_parameter_changes_before_a_step,
    loading_mends,
    nobody_steps_it,
    a_write_goes_wrong,
]


@pytest.mark.parametrize("case", CASES)
def test_changes_on_disk_are_found(world1: World, case: Any, tmp_path: Path) -> None:
    world1.run(case, str(tmp_path))
