"""Beside polyshard-offload: where things rest changes no bit of what travels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from quantized_models import build, shard, tokens_for
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from toy_models import loss_of

from polyshard import describe, stats
from polyshard_quantized import ErrorFeedback, Float8Block, Int4Block, Int8Block, QuantizedComm
from polyshard_testing import World, ranks

pytest.importorskip("polyshard_offload", reason="needs polyshard-offload")
from polyshard_offload import DiskSettings, Offload
from polyshard_offload.tiers.swap_file import SwapFile

STEPS = 4


def quantized(kind: str) -> QuantizedComm:
    if kind == "int4":
        return QuantizedComm(gradients=Int4Block(), error_feedback=ErrorFeedback())
    if kind == "e4m3":
        return QuantizedComm(weights=Float8Block(), gradients=Float8Block())
    return QuantizedComm(gradients=Int8Block())


def trained(
    rank: int, kind: str, offload: Offload | None, keywords: dict[str, Any]
) -> tuple[list[float], nn.Module, int]:
    """Losses and norms, with accumulation and clipping; the model; bytes this rank sent."""
    plugins: Sequence[object] = [quantized(kind), *([offload] if offload is not None else [])]
    model = shard(build(), plugins, **keywords)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if offload is not None:
        optimizer = offload.wrap(optimizer)
    found: list[float] = []
    for step in range(STEPS):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            loss = loss_of(model, tokens_for(10 * step + micro, rank))
            loss.backward()
            found.append(loss.item())
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found.append(float(norm.full_tensor()))
        optimizer.step()
        optimizer.zero_grad()
    return found, model, stats(model).bytes_sent


def same_as_alone(rank: int, size: int, kind: str, offload: Offload, blocks: int | None) -> None:
    keywords = {} if blocks is None else {"reshard_after_forward": blocks}
    expected, alone, sent_alone = trained(rank, kind, None, keywords)
    found, together, sent = trained(rank, kind, offload, keywords)
    assert found == expected
    assert sent == sent_alone
    weights: Any = zip(alone.named_parameters(), together.parameters(), strict=True)
    for (name, a), b in weights:
        assert torch.equal(a.full_tensor().cpu(), b.full_tensor().cpu()), name
    text = str(describe(together))
    assert "gather codec quantized" in text
    if offload.params != "device":
        assert f"storage {offload.params}" in text


TIERS = {
    "host": {"params": "host"},
    "optimizer on the host": {"optimizer": "host"},
    "optimizer on disk": {"params": "host", "optimizer": "disk"},
    "everything on disk": {"params": "disk", "grads": "disk", "optimizer": "disk"},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_same_bits_as_alone(world2: World, kind: str, tiers: str, tmp_path: Path) -> None:
    disk = DiskSettings(path=tmp_path, block_bytes=64 << 10)
    offload = Offload(**TIERS[tiers], disk=disk, chunk_bytes=20_000)  # type: ignore[arg-type]
    world2.run(same_as_alone, kind, offload, None)


def test_uneven_ranks_and_blocks_of_ranks(world3: World, world4: World, tmp_path: Path) -> None:
    disk = DiskSettings(path=tmp_path, block_bytes=64 << 10)
    world3.run(same_as_alone, "e4m3", Offload(params="host", optimizer="disk", disk=disk), None)
    world4.run(same_as_alone, "int8", Offload(params="host"), 2)


@ranks(2)
def test_payloads_are_kept_beside_offload(rank: int, size: int, tmp_path: Path) -> None:
    """Shards that come and go look unchanged, so a payload is made once a step."""
    from polyshard_quantized.transfers.gather import BoundGather

    path = str(tmp_path)

    encoded: list[int] = []
    original = BoundGather.encode

    def counting(self: BoundGather, shard: torch.Tensor, payload: torch.Tensor) -> None:
        encoded.append(1)
        original(self, shard, payload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundGather, "encode", counting)
        for offload in (Offload.cpu(), Offload.on_disk(path)):
            encoded.clear()
            model = shard(build(), [QuantizedComm(), offload])
            optimizer = offload.wrap(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
            for step in range(2):
                for micro in range(3):
                    loss_of(model, tokens_for(10 * step + micro, rank)).backward()
                assert len(encoded) == 3 * (step + 1)  # groups, once a step
                optimizer.step()
                optimizer.zero_grad()


class CountedReads:
    """Bytes that a swap file was asked for, in this process."""

    def __init__(self, file: SwapFile, patch: pytest.MonkeyPatch) -> None:
        self.nbytes = 0
        original = file.read

        def counting(offset: int, target: torch.Tensor) -> None:
            self.nbytes += target.nbytes
            original(offset, target)

        patch.setattr(file, "read", counting)

    def take(self) -> int:
        """What was read since the last time."""
        nbytes, self.nbytes = self.nbytes, 0
        return nbytes


@pytest.mark.parametrize("prefetch", [0, 2])
@ranks(2)
def test_a_shard_on_disk_is_read_once_a_forward(
    rank: int, size: int, tmp_path: Path, prefetch: int
) -> None:
    """From disk a shard is read in the first gather of a step, and by nothing after it."""
    disk = DiskSettings(path=tmp_path)
    offload = Offload(params="disk", optimizer="disk", disk=disk, prefetch=prefetch)
    model = shard(build(), [QuantizedComm(), offload])
    optimizer = offload.wrap(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    shards = sum(storage.shard_bytes for storage in offload.tiers.storages)
    with pytest.MonkeyPatch.context() as patch:
        reads = CountedReads(offload.tiers.files["parameters"], patch)
        for step in range(3):
            loss = loss_of(model, tokens_for(step, rank))
            assert reads.take() == shards
            loss.backward()
            assert reads.take() == 0
            loss = loss_of(model, tokens_for(step, rank))  # another micro-batch looks once more
            assert reads.take() == shards
            loss.backward()
            assert reads.take() == 0
            optimizer.step()
            optimizer.zero_grad()
            reads.take()


@ranks(2)
def test_a_shard_on_the_host_is_encoded_where_it_rests(rank: int, size: int) -> None:
    """On the host a codec reads what rests there: no shard is copied anywhere."""
    offload = Offload(params="host")
    model = shard(build(), [QuantizedComm(), offload])
    for step in range(2):
        loss_of(model, tokens_for(step, rank)).backward()
    assert offload.tiers.staging.peak_bytes == 0
    native = Offload(params="host")
    model = shard(build(), [native])
    loss_of(model, tokens_for(0, rank)).backward()
    assert native.tiers.staging.peak_bytes > 0


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["host", "disk"])
@ranks(1)
def test_payloads_move_to_an_accelerator(
    rank: int, size: int, tier: Literal["host", "disk"], tmp_path: Path
) -> None:
    """What moves to the device is the payload: training is that without offload."""
    found = torch.accelerator.current_accelerator()
    assert found is not None
    device = torch.device(found.type, 0)
    mesh = init_device_mesh(device.type, (1,))
    losses: list[list[float]] = []
    disk = DiskSettings(path=tmp_path)
    for resting in (None, Offload(params=tier, optimizer="host", disk=disk)):
        plugins = [QuantizedComm(), *([resting] if resting is not None else [])]
        model = shard(build().to(device), plugins, mesh=mesh)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if resting is not None:
            optimizer = resting.wrap(optimizer)
        losses.append([])
        for step in range(3):
            loss = loss_of(model, tokens_for(step, rank).to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
