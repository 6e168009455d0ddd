"""The ``Trainer`` of transformers: polyshard's, beside its own with ``fsdp`` settings."""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import common
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)


class Losses(TrainerCallback):
    """Keeps what the Trainer logs."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        """Every step logs a loss; the end of training logs none."""
        del args, state, control, kwargs
        if logs and "loss" in logs:
            self.values.append(logs["loss"])


class HostTrainer(Trainer):
    """Takes the FSDP2 route without an accelerator."""

    def create_accelerator_and_postprocess(self) -> None:
        """As in the base, and then FSDP2."""
        super().create_accelerator_and_postprocess()
        common.admit_fsdp(self.accelerator, FullyShardedDataParallelPlugin(fsdp_version=2))
        self.is_fsdp_enabled = True


def chosen(engine: str) -> tuple[Any, Any, dict[str, Any]]:
    """Where engines differ: a Trainer, what it is given, and settings."""
    model = common.tiny_llama()
    if engine == "polyshard":
        from polyshard_accelerate import PolyshardTrainer

        return PolyshardTrainer, model, {}
    settings = {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2}}
    return HostTrainer, common.shard_llama(model, common.engine(engine)), settings


def loop(arguments: argparse.Namespace) -> list[float]:
    """Gradients of two batches accumulated, clipped by the Trainer, a schedule of its own."""
    dist.init_process_group("gloo")
    kind, model, fsdp = chosen(arguments.engine)
    rows = [row for step in range(4 * common.STEPS) for row in common.batch(step, 0)]
    losses = Losses()
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=common.STEPS,
            per_device_train_batch_size=common.ROWS,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **fsdp,
        )
        trainer = kind(
            model=model,
            args=settings,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=[losses],
        )
        trainer.train()
    return losses.values


if __name__ == "__main__":
    common.main(loop, common.parser(__doc__))
