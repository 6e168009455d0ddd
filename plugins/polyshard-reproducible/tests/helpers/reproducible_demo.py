"""The demonstration on the ranks of a test: what a run leaves behind, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from reproducible_runs import digests
from torch import Tensor, nn

from polyshard_cli.compare.engines.built import Place
from polyshard_demo.settings import Settings
from polyshard_demo.text import Corpus
from polyshard_demo.train import Trainer

SLOTS = 8
SYLLABLES = "".join(random.Random(0).choices(["ba ", "do", "qui", "x"], k=6000)).encode()
OPTIONS = {
    "preset": "tiny", "batch": 2 * SLOTS, "sequence": 24, "lr": 1e-2, "dropout": 0.1,
    "reproducible": SLOTS, "device": "cpu",
}  # fmt: skip
"""Everything that could see ranks, at the smallest size."""


def demo(rank: int, size: int, out: str, **given: Any) -> Trainer:
    """A run that is about to start; every step is clipped."""
    often = {"checkpoint_every": 0, "eval_every": 3, "eval_batches": 1, "log_every": 1000}
    settings = Settings(
        **{"out": Path(out), "ranks": size, "clip": 0.3, **OPTIONS, **often, **given}
    )
    place = Place(rank, size, torch.get_default_device())
    return Trainer.start(settings, place, Corpus("syllables", SYLLABLES))


def state_of(trainer: Trainer) -> dict[str, str]:
    """Digests of weights, optimizer state, and every number that the run has printed."""
    history = trainer.history
    steps = [[step.loss, step.norm, step.lr] for step in history.steps]
    held_out = [[one.step, one.loss] for one in history.evaluations]
    values = [torch.tensor(row, dtype=torch.float64) for row in (*steps, *held_out)]
    return digests(trainer.built.model, trainer.built.optimizer, values)


def trained(rank: int, size: int, out: str, options: dict[str, Any]) -> dict[str, str]:
    """A whole run."""
    trainer = demo(rank, size, out, **options)
    trainer.run()
    return state_of(trainer)


def nothing(step: int, slot: int) -> None:
    """What usually happens around a slot."""


@dataclass(frozen=True)
class Disturbed:
    """The plugin, with something that happens around slots."""

    plugin: Any
    before: Callable[[int, int], None] = nothing
    after: Callable[[int, int], None] = nothing

    def each_slot(self, model: nn.Module, *, step: int) -> Iterator[int]:
        for slot in self.plugin.each_slot(model, step=step):
            self.before(step, slot)
            yield slot
            self.after(step, slot)

    def mean(self, model: nn.Module, losses: list[Tensor]) -> Tensor:
        found: Tensor = self.plugin.mean(model, losses)
        return found


def disturbed(trainer: Trainer, **given: Callable[[int, int], None]) -> Trainer:
    """The same run, with what happens ``before`` or ``after`` a slot."""
    passes = trainer.passes
    return replace(trainer, passes=replace(passes, slots=Disturbed(passes.slots, **given)))
