"""What is not supported is an error on every rank, with what to do instead."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning", reason="pip install 'polyshard-lightning[lightning]'")

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_runs import Odd, batches, trainer
from torch.distributed.fsdp import fully_shard

import polyshard
from polyshard.errors import MeshError, ModuleError, SettingError, UnsupportedError
from polyshard_lightning import PolyshardStrategy
from polyshard_lightning.precision import clipping
from polyshard_testing import ranks


class TorchSharded(Odd):
    def configure_model(self) -> None:
        fully_shard(self.blocks[0])


class SelfSharded(Odd):
    def configure_model(self) -> None:
        polyshard.fully_shard(self.blocks[0])


class OnMeta(Odd):
    def configure_model(self) -> None:
        self.head = torch.nn.Linear(7, 3, device="meta")


CASES: list[tuple[type[Odd], dict[str, Any], type[Exception], str]] = [
    (TorchSharded, {}, ModuleError, "blocks.0.*Import fully_shard from polyshard"),
    (SelfSharded, {"units": ["blocks.*"]}, SettingError, "units.*configure_model of SelfSharded"),
    (OnMeta, {}, ModuleError, "head.*load_pretrained"),
    (Odd, {"units": ["layers.*"]}, SettingError, "layers.*: no module"),
    (Odd, {"mesh": (2, 2)}, MeshError, "are 4, but the Trainer has 2"),
]


@ranks(2)
@pytest.mark.parametrize(("kind", "given", "error", "text"), CASES)
def test_modules_and_settings(
    rank: int, size: int, kind: type[Odd], given: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        trainer(size, PolyshardStrategy(**given)).fit(kind(), batches(1, rank))


@ranks(2)
def test_synchronised_batch_norms(rank: int, size: int) -> None:
    with pytest.raises(UnsupportedError, match="convert_sync_batchnorm"):
        trainer(size, PolyshardStrategy(), sync_batchnorm=True).fit(Odd(), batches(1, rank))


def test_scaled_losses() -> None:
    with pytest.raises(UnsupportedError, match="bf16-mixed"):
        clipping(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")))


def test_sizes_of_tensor_parallelism() -> None:
    with pytest.raises(UnsupportedError, match="tensor_parallel_size"):
        PolyshardStrategy(tensor_parallel_size=2)


def test_state_of_plugins_keeps_its_name() -> None:
    plugin = clipping(MixedPrecision("bf16-mixed", "cpu"))
    assert type(plugin).__qualname__ == "MixedPrecision"
    assert clipping(plugin) is plugin
    assert isinstance(plugin, MixedPrecision)
