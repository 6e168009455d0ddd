"""Shards on disk that are opened by several optimizers, rest anew, or have no values yet."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_toys import assert_same_state, assert_same_values, on, wrapped
from torch import nn
from torch.optim import SGD, AdamW

from polyshard import fully_shard
from polyshard_offload import DiskSettings, Offload
from polyshard_offload.shards.disk_storage import DiskStorage
from polyshard_testing import ranks


def sharded(offload: Offload | None, *, sizes: tuple[int, ...] = (6, 7, 8, 3)) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
    plugins = [] if offload is None else [offload]
    for layer in model:
        fully_shard(layer, plugins=plugins)
    return fully_shard(model, plugins=plugins)


def backward(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    model(torch.rand(5, 6, generator=generator).to(dtype)).float().square().sum().backward()


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("checksums", [False, True])
@ranks(2)
def test_two_optimizers_over_one_shard(
    rank: int, size: int, in_backward: bool, checksums: bool, tmp_path: Path
) -> None:
    """One steps weights and one biases, which lie in the same shards."""
    found = []
    disk = DiskSettings(path=tmp_path, checksums=checksums)
    for offload in (None, on("", "disk", "disk", disk=disk, step_in_backward=in_backward)):
        model = sharded(offload)
        optimizers: list[Any] = [
            AdamW([p for p in model.parameters() if p.ndim == 2], lr=0.1),
            SGD([p for p in model.parameters() if p.ndim == 1], lr=0.1, momentum=0.9),
        ]
        for optimizer in optimizers:
            wrapped(optimizer, offload)
        for seed in range(4):
            backward(model, seed)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if offload is not None:
            assert offload.tiers.step_staging.bytes_now == 0
        found.append((model, optimizers))
    assert_same_values(found[0][0], found[1][0])
    for theirs, ours in zip(found[0][1], found[1][1], strict=True):
        assert_same_state(theirs, ours)


@pytest.mark.parametrize("in_backward", [False, True])
@ranks(2)
def test_the_dtype_may_change_between_steps(
    rank: int, size: int, in_backward: bool, tmp_path: Path
) -> None:
    """What a step has opened is of the old dtype, and of no use for the next."""
    found = []
    for offload in (None, on(str(tmp_path), "disk", "disk", step_in_backward=in_backward)):
        model = sharded(offload)
        optimizer = wrapped(SGD(model.parameters(), lr=0.1), offload)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            model.to(dtype)
            for seed in range(2):
                backward(model, seed)
                optimizer.step()
                optimizer.zero_grad()
        found.append(model)
    assert_same_values(*found)


@ranks(2)
def test_a_shard_that_comes_to_rest_is_read_anew(rank: int, size: int, tmp_path: Path) -> None:
    """Also where it is read ahead for a step at that moment."""
    model = sharded(on(str(tmp_path), "disk", "disk"))
    storage = model[0]._polyshard_unit.groups[0].shards.storage
    assert isinstance(storage, DiskStorage)
    storage.begin_open()
    model.to(torch.float64)
    assert storage.open(model).dtype is torch.float64
    storage.close(model)
    storage.finish()


@ranks(2)
def test_a_shard_without_values_has_no_parameter(rank: int, size: int, tmp_path: Path) -> None:
    """What has no rows on this rank has no address, as all tensors on the meta device."""
    offload = on(str(tmp_path), "disk", "disk")
    model = sharded(offload, sizes=(6, 1))
    with torch.device("meta"):
        late: Any = fully_shard(nn.Linear(4, 4), plugins=[offload])
    weight: Any = model[0].weight
    assert offload.tiers.storage_of(late.weight) is None
    found = offload.tiers.storage_of(weight)
    assert (found is None) == (weight.to_local().numel() == 0)
    optimizer = offload.wrap(AdamW(model.parameters(), lr=0.1))
    backward(model, 0)
    optimizer.step()
