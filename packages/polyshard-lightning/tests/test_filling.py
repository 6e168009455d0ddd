"""A module whose model of transformers is filled from a folder trains as one that had values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="pip install 'polyshard-lightning[lightning]'")
pytest.importorskip("transformers", reason="pip install transformers")

import torch
from lightning.pytorch import LightningModule
from lightning_runs import batches, trainer, whole
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from polyshard.errors import CheckpointError, SettingError
from polyshard_lightning import PolyshardStrategy
from polyshard_testing import ranks

SIZES: dict[str, Any] = {
    "hidden_size": 12, "intermediate_size": 25, "num_hidden_layers": 2, "vocab_size": 33,
    "num_attention_heads": 2, "num_key_value_heads": 1, "attn_implementation": "eager",
    "tie_word_embeddings": True,
}  # fmt: skip


class Tuned(LightningModule):
    """Of a model, and a parameter of its own."""

    def __init__(self, *models: Any) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.models = torch.nn.ModuleList(models)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        tokens = batch.abs().mul(10).long() % SIZES["vocab_size"]
        loss: Tensor = self.models[0](input_ids=tokens, labels=tokens).loss * self.scale
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def tiny() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def on_meta() -> Any:
    with torch.device("meta"):
        return tiny()


@ranks(2, 3)
def test_losses_are_those_of_a_model_with_values(rank: int, size: int, tmp_path: Path) -> None:
    if rank == 0:
        tiny().save_pretrained(tmp_path)
    torch.distributed.barrier()
    filled, plain = Tuned(on_meta()), Tuned(tiny())
    trainer(size, PolyshardStrategy(pretrained=tmp_path)).fit(filled, batches(4, rank))
    trainer(size, PolyshardStrategy()).fit(plain, batches(4, rank))
    assert len(filled.losses) == 4
    assert filled.losses == plain.losses
    expected = whole(plain)
    for name, weight in whole(filled).items():
        assert torch.equal(weight, expected[name]), name


@ranks(2)
def test_what_cannot_be_filled(rank: int, size: int, tmp_path: Path) -> None:
    strategy = PolyshardStrategy(pretrained=tmp_path / "none")
    with pytest.raises(CheckpointError, match="there is no"):
        trainer(size, strategy).fit(Tuned(on_meta()), batches(1, rank))
    strategy = PolyshardStrategy(pretrained=tmp_path)
    with pytest.raises(SettingError, match=r"Tuned has models\.0, models\.1"):
        trainer(size, strategy).fit(Tuned(on_meta(), on_meta()), batches(1, rank))
