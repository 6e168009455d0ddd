"""Lightning: its ``ModelParallelStrategy`` leaves the sharding to ``configure_model``."""

from __future__ import annotations

import argparse

import common
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Bigrams(LightningModule):
    """An embedding, two layers and a head, which predict the next token."""

    def __init__(self, fully_shard: common.FullyShard) -> None:
        super().__init__()
        self.fully_shard = fully_shard
        self.losses: list[float] = []
        self.table = nn.Embedding(common.VOCABULARY, common.WIDTH)
        self.layers = nn.ModuleList(nn.Linear(common.WIDTH, common.WIDTH) for _ in range(2))
        self.head = nn.Linear(common.WIDTH, common.VOCABULARY)

    def configure_model(self) -> None:
        """Where Lightning wants a model sharded: here engines differ, and nowhere else."""
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            self.fully_shard(layer, mesh=mesh)
        self.fully_shard(self, mesh=mesh)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[rows, tokens, vocabulary]``."""
        x = self.table(tokens)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        logits: Tensor = self.head(x)
        return logits

    def training_step(self, tokens: Tensor) -> Tensor:
        """The loss of one batch."""
        logits = self(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over sharded parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loop(arguments: argparse.Namespace) -> list[float]:
    """A ``Trainer`` that steps after each batch.

    With ``accumulate_grad_batches`` Lightning asks models that have ``no_sync`` to reduce once a
    step. polyshard's have it and torch's do not: those reduce each batch, and round differently.
    """
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=common.STEPS,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        use_distributed_sampler=False,
    )
    model = Bigrams(common.engine(arguments.engine))
    batches = [common.batch(step, trainer.global_rank) for step in range(common.STEPS)]
    trainer.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return model.losses


if __name__ == "__main__":
    common.main(loop, common.parser(__doc__))
