"""Lightning: one strategy instead of another.

polyshard's shards the module by itself; Lightning's own leaves that to ``configure_model``.
"""

from __future__ import annotations

import argparse

import common
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader


class Bigrams(LightningModule):
    """An embedding, two layers and a head, which predict the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.table = nn.Embedding(common.VOCABULARY, common.WIDTH)
        self.layers = nn.ModuleList(nn.Linear(common.WIDTH, common.WIDTH) for _ in range(2))
        self.head = nn.Linear(common.WIDTH, common.VOCABULARY)

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


class ShardedByTorch(Bigrams):
    """What ``ModelParallelStrategy`` wants of a module."""

    def configure_model(self) -> None:
        """The units that polyshard's strategy finds by itself."""
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)


def strategy(engine: str) -> Strategy:
    """Where engines differ."""
    if engine == "polyshard":
        from polyshard_lightning import PolyshardStrategy

        return PolyshardStrategy(process_group_backend="gloo")
    return ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
    )


def loop(arguments: argparse.Namespace) -> list[float]:
    """A ``Trainer`` that steps after each batch.

    With ``accumulate_grad_batches`` polyshard's strategy reduces once a step and Lightning's own
    each batch, which rounds differently.
    """
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy(arguments.engine),
        max_steps=common.STEPS,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        use_distributed_sampler=False,
    )
    model = Bigrams() if arguments.engine == "polyshard" else ShardedByTorch()
    batches = [common.batch(step, trainer.global_rank) for step in range(common.STEPS)]
    trainer.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return model.losses


if __name__ == "__main__":
    common.main(loop, common.parser(__doc__))
