"""The demonstration as a job: bytes of real text, a Llama-style model."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from polyshard_cli.compare.errors import JobError
from polyshard_cli.compare.job.job import Job
from polyshard_cli.compare.settings import Settings

__all__ = ["demonstration"]

PRESET = "small"


def demonstration(settings: Settings) -> Callable[[], Job]:
    """What makes the job that ``demo`` or ``demo:PRESET`` names.

    Raises:
        JobError: where the demonstration is not installed, or has no such preset.
    """
    if find_spec("polyshard_demo") is None:
        raise JobError(
            f"JOB {settings.job} needs the demonstration, which is not installed: "
            "pip install polyshard-demo"
        )
    model = import_module("polyshard_demo.model")
    preset = settings.job.partition(":")[2] or PRESET
    if preset not in model.PRESETS:
        close = difflib.get_close_matches(preset, model.PRESETS, n=1, cutoff=0) or [PRESET]
        raise JobError(
            f"JOB {settings.job}: no preset is called {preset!r}; did you mean demo:{close[0]}? "
            f"Known: {', '.join(model.PRESETS)}"
        )
    shape = replace(model.PRESETS[preset], sequence=settings.sequence)
    text = import_module("polyshard_demo.text")

    def build() -> Job:
        corpus = text.load_corpus(None, settings.sequence)

        def batch(step: int, rank: int, ranks: int) -> Any:
            rows = settings.batch * ranks
            every = text.Batches(corpus, rows, settings.sequence, settings.seed, rank, ranks)
            return every.micro_batches(step, 1)[0]

        return Job(model.LanguageModel(shape), batch, _cross_entropy)

    return build


def _cross_entropy(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Of the next byte, in nats."""
    inputs, targets = pair
    logits: Tensor = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
