"""The ``Trainer`` of transformers with polyshard's engine."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Trainer
from typing_extensions import override

from polyshard import FSDPModule
from polyshard.errors import UnsupportedError
from polyshard_accelerate import state
from polyshard_accelerate.accelerator import PolyshardAccelerator
from polyshard_accelerate.sharding import Sharding, reshard
from polyshard_checkpoint import load_pretrained, save_pretrained
from polyshard_checkpoint.pretrained import library

__all__ = ["PolyshardTrainer"]

FOLDER = "polyshard"
"""Of a checkpoint: weights, optimizer and schedule, each rank's own shards."""

# There are no others for saving and loading. A version without one of them would pass over ours.
OVERRIDDEN = (
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_move_model_to_device",
    "_save_optimizer_and_scheduler",
)
if _missing := [name for name in OVERRIDDEN if not hasattr(Trainer, name)]:
    raise ImportError(
        f"PolyshardTrainer overrides {', '.join(_missing)} of transformers.Trainer, which "
        f"transformers {transformers.__version__} does not have. Install transformers 5.23."
    )


class PolyshardTrainer(Trainer):
    """Trains a model that it shards; everything else is as with ``Trainer``.

    Checkpoints have ``model.safetensors``, as every ``Trainer`` writes it, each rank its own bytes,
    and the folder ``polyshard``, from which training is resumed, at any number of ranks.

    A subclass of another Trainer: ``class Mine(PolyshardTrainer, SFTTrainer)``.
    """

    def __init__(self, *args: Any, sharding: Sharding | None = None, **kwargs: Any) -> None:
        """The model is sharded when it is first trained or evaluated.

        Args:
            args: of ``Trainer``.
            sharding: how.
            kwargs: of ``Trainer``.

        Raises:
            UnsupportedError: for other engines in the arguments, and precisions that scale losses.
        """
        self.sharding = sharding or Sharding()
        super().__init__(*args, **kwargs)

    @override
    def create_accelerator_and_postprocess(self) -> None:
        """The accelerator that ``Trainer`` makes is one of polyshard's from then on."""
        if self.args.fsdp or self.args.deepspeed:
            raise UnsupportedError(
                "PolyshardTrainer: TrainingArguments ask for "
                f"{'fsdp' if self.args.fsdp else 'deepspeed'}, which would shard as well. Leave it "
                "out; PolyshardTrainer(sharding=Sharding(...)) configures sharding."
            )
        super().create_accelerator_and_postprocess()
        self.accelerator = PolyshardAccelerator.of(self.accelerator, self.sharding)

    @override
    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: sharding moves what a rank keeps."""

    @override
    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Of the sharded parameters, also after an evaluation."""
        reshard(self._model() if model is None else model)
        return super().create_optimizer(model)

    # Checkpoints ------------------------------------------------------------------------------

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save all weights as ``from_pretrained`` takes them; every rank calls this.

        Each writes the bytes of its own shards. Models that are neither of transformers nor of peft
        are gathered in the host memory of the first rank.
        """
        output_dir = output_dir or self.args.output_dir
        assert output_dir is not None  # TrainingArguments has a default
        model = self._model()
        if isinstance(model, FSDPModule) and _saves_itself(model):
            save_pretrained(model, output_dir)
            self._save_others(output_dir)
        else:
            weights = self.accelerator.get_state_dict(self.model)
            if self.args.should_save:
                self._save(output_dir, state_dict=weights)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_others(self, output_dir: str) -> None:
        """What ``Trainer`` saves beside the model: the tokenizer, its own arguments."""
        if not self.args.should_save:
            return
        with tempfile.TemporaryDirectory(dir=output_dir) as folder:
            model, self.model = self.model, _Saved()
            try:
                self._save(folder, state_dict={})
            finally:
                self.model = model
            for path in Path(folder).rglob("*"):
                if path.is_file() and path.suffix != ".safetensors":
                    place = Path(output_dir, path.relative_to(folder))
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.move(path, place)

    @override
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state.save_one(Path(output_dir, FOLDER), self._model(), *self._training())

    @override
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Weights too: the model is sharded by now, and filled where ``pretrained`` says."""
        if checkpoint is None:
            return
        if _is_sharded(checkpoint):
            state.load_one(Path(checkpoint, FOLDER), self._model(), *self._training())
        elif self.sharding.pretrained is not None:
            load_pretrained(self._model(), checkpoint)

    def _model(self) -> nn.Module:
        assert isinstance(self.model, nn.Module)
        return self.model

    def _training(self) -> tuple[list[Any], dict[str, Any]]:
        return state.plain([self.optimizer]), {"schedule": self.lr_scheduler}

    @override
    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        target: Any = self.model if model is None else model
        if _is_sharded(resume_from_checkpoint):
            return  # with the optimizer
        is_sharded = isinstance(target, FSDPModule)
        if is_sharded:
            load_pretrained(target, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, target)

    @override
    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        assert best is not None
        if _is_sharded(best):
            state.load_one(Path(best, FOLDER), self._model(), [])
        else:  # save_only_model
            load_pretrained(self._model(), best)


class _Saved(nn.Module):
    """Replaces a model that was saved already."""


def _saves_itself(model: nn.Module) -> bool:
    """Whether it is a model of transformers, or of peft."""
    plain = library.uncompiled(model)
    return library.is_transformers(plain) or library.is_peft(plain)


def _is_sharded(checkpoint: str) -> bool:
    return Path(checkpoint, FOLDER).is_dir()
