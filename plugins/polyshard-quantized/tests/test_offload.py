"""Beside polyshard-offload: where things rest changes no bit of what travels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import build, loss_of, shard, tokens_for
from torch import nn

from polyshard import describe, stats
from polyshard.testing import World
from polyshard_quantized import ErrorFeedback, Float8Block, Int4Block, Int8Block, QuantizedComm

pytest.importorskip("polyshard_offload", reason="needs polyshard-offload")
from polyshard_offload import DiskSettings, Offload

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
    for (name, a), b in zip(alone.named_parameters(), together.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor()), name  # type: ignore[attr-defined]
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


def fetched(rank: int, size: int, path: str) -> None:
    """Shards that come and go look unchanged, so a payload is made once a step."""
    from polyshard_quantized.gather import BoundGather

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


def test_payloads_are_kept_beside_offload(world2: World, tmp_path: Path) -> None:
    world2.run(fetched, str(tmp_path))
