"""Accelerators, and kvikio: by a stand-in with its signatures where there is no CUDA driver."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from polyshard import fully_shard
from polyshard_offload import DiskSettings, Offload, StorageError
from polyshard_offload.tiers.swap_file import SwapFile
from polyshard_testing import ranks

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


# kvikio: 26.10 imports without a GPU, but moves nothing without libcuda.so.1 ---------------------


class StandIn:
    """``kvikio.CuFile`` of 26.10: the same arguments, host memory by the buffer protocol."""

    broken = False
    short = False

    def __init__(self, file: Path | str, flags: str = "r") -> None:
        assert flags == "r+"
        self._descriptor = os.open(file, os.O_RDWR)

    def read(
        self, buf: Any, size: int | None = None, file_offset: int = 0, task_size: int | None = None
    ) -> int:
        self._check()
        moved = os.preadv(self._descriptor, [memoryview(buf)[:size]], file_offset)
        return moved - 1 if self.short else moved

    def write(
        self, buf: Any, size: int | None = None, file_offset: int = 0, task_size: int | None = None
    ) -> int:
        self._check()
        return os.pwritev(self._descriptor, [memoryview(buf)[:size]], file_offset)

    def _check(self) -> None:
        if self.broken:
            raise RuntimeError("KvikIO failure at: somewhere")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    monkeypatch.setitem(sys.modules, "kvikio", SimpleNamespace(CuFile=StandIn))
    monkeypatch.setattr(StandIn, "broken", False)
    monkeypatch.setattr(StandIn, "short", False)
    return StandIn


def test_kvikio_moves_what_posix_moves(
    stand_in: type[StandIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = DiskSettings(path=tmp_path, backend="kvikio", block_bytes=8192, checksums=True)
    file = SwapFile(settings, "things", 3)
    values = torch.arange(50_000, dtype=torch.int32).view(torch.uint8)
    offset = file.allocate(values.numel())
    file.write(offset, values)
    file.check_written(offset, values)
    target = torch.zeros_like(values)
    file.read(offset, target)
    assert torch.equal(target, values)
    assert torch.equal(file.window(offset, values.numel()), values)
    monkeypatch.setattr(stand_in, "short", True)
    with pytest.raises(StorageError, match=r"rank 3: reading things .*moved 8191 of 8192 bytes"):
        file.read(offset, target)
    monkeypatch.setattr(stand_in, "broken", True)
    for move in (file.read, file.write):
        with pytest.raises(StorageError, match=r"rank 3: .*things.* failed: .*KvikIO failure"):
            move(offset, target)


def test_kvikio_trains_the_same(stand_in: type[StandIn], tmp_path: Path) -> None:
    found = []
    for backend in ("posix", "kvikio"):
        disk = DiskSettings(path=tmp_path, backend=backend)
        params = [nn.Parameter(torch.linspace(0, 1, 4000)) for _ in range(3)]
        optimizer = Offload(optimizer="disk", disk=disk, chunk_bytes=1).wrap(
            torch.optim.AdamW(params, lr=0.1)
        )
        for step in range(4):
            for index, p in enumerate(params):
                p.grad = torch.full_like(p, 0.1 * step + index)
            optimizer.step()
        found.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_kvikio_that_is_not_installed_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(ImportError, match="kvikio"):
        SwapFile(DiskSettings(path=tmp_path, backend="kvikio"), "things", 0)


# With an accelerator ---------------------------------------------------------------------------


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("in_backward", [False, True])
@ranks(1)
def test_every_tier_on_a_gpu(rank: int, size: int, in_backward: bool, tmp_path: Path) -> None:
    """One rank, on a stream that is not the default one: orders must be made, not inherited."""
    torch.cuda.set_device(0)
    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (1,))
    with torch.cuda.stream(torch.cuda.Stream()):
        results = {}
        for params, optimizer in (
            ("device", "device"), ("device", "host"), ("device", "disk"), ("host", "host"),
            ("host", "disk"), ("disk", "disk"),
        ):  # fmt: skip
            disk = DiskSettings(path=tmp_path)
            away = optimizer != "device"
            offload = Offload(
                params=params,  # type: ignore[arg-type]
                optimizer=optimizer,  # type: ignore[arg-type]
                disk=disk,
                chunk_bytes=1 << 20,
                step_in_backward=in_backward and away,
            )
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))).cuda()
            for layer in model:
                fully_shard(layer, mesh=mesh, plugins=[offload])
            fully_shard(model, mesh=mesh, plugins=[offload])
            made = offload.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            for step in range(6):
                inputs = torch.full((64, 512), 0.01 * step, device="cuda")
                model(inputs).square().mean().backward()
                made.step()
                made.zero_grad()
            found = [p.detach().to_local().cpu().clone() for p in model.parameters()]  # type: ignore[attr-defined]
            results[params, optimizer] = found
        expected = results.pop(("device", "device"))
        assert all(map(torch.all, map(torch.isfinite, expected)))
        for (params, _), found in results.items():
            for one, other in zip(found, expected, strict=True):
                if params == "device":  # the same device arithmetic
                    assert torch.equal(one, other)
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@needs_gpu
def test_host_memory_is_pinned() -> None:
    arena = Offload().tiers.arena("parameters", torch.float32)
    assert arena.pinned
    assert arena.take(5000).is_pinned()
    assert not Offload(pin=False).tiers.arena("parameters", torch.float32).take(5000).is_pinned()


@pytest.mark.gpu
@needs_gpu
@ranks(1)
def test_copies_wait_for_the_memory_they_fill(rank: int, size: int) -> None:
    """A copy into memory whose last use has not ended yet comes behind it."""
    from polyshard_offload.shards.host_storage import HostStorage
    from polyshard_offload.shards.staging import StagingState
    from polyshard_offload.tiers.host_memory import Arena

    class Nowhere:
        places_on_stream = True

        def place(self, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    device = torch.device("cuda", 0)
    storage = HostStorage(Arena(pinned=True), device, StagingState(), Nowhere())
    numel = 16 << 20
    resting = storage.rest(torch.ones(numel, device=device))
    storage.fetch()
    torch.cuda.synchronize()
    storage.release()
    with torch.cuda.stream(torch.cuda.Stream()):
        scratch = torch.full((numel,), 5.0, device=device)
        torch.cuda._sleep(100_000_000)
        kept = scratch + 1  # reads scratch late
        del scratch  # its memory may be what the storage is given next
        resting.is_pinned()
        storage.fetch()
        near = storage.view().clone()
        assert bool((kept == 6).all())
        assert bool((near == 1).all())
        storage.release()
