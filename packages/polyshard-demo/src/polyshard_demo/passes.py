"""What a rank computes in a step, and what ranks add up: gradients, losses, norms.

Rows of a step are cut into equal parts. Usually each rank has one of them, and sums are made over
ranks. With ``--reproducible`` there is a part for each slot, whichever rank runs it, and every sum
has an order of its own, so that results are the same bits at every number of ranks.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyshard.clipping import clip_grads_with_norm_, grad_norm
from polyshard_cli.compare.engines.built import Place
from polyshard_demo.ranks import mean
from polyshard_demo.settings import Settings
from polyshard_demo.text import Batches, Corpus

__all__ = ["Passes"]


@dataclass(frozen=True)
class Passes:
    """The passes of one rank. Ranks that share layers share their rows."""

    settings: Settings
    place: Place
    model: Any  # sharded
    corpus: Corpus
    slots: Any = None  # polyshard_reproducible.Reproducible, if the model is sharded with it
    norm: Callable[[list[Tensor]], Tensor] = grad_norm

    def train(self, step: int) -> float:
        """Leave the gradients of a step; the mean loss over all of its rows, nats per byte."""
        if self.slots is not None:
            return self._train_slots(step)
        (part,), count = self._own, self.settings.accumulate
        losses: list[Tensor] = []
        for index, pair in enumerate(self._batches(part).micro_batches(step, count), 1):
            if self.settings.dropout:
                # It follows from seed, step and data: ranks that share both leave out the same.
                keys = (self.settings.seed, step, part, index)
                torch.manual_seed(random.Random(f"dropout/{keys}").getrandbits(63))
            if self.settings.engine != "single":
                self.model.set_requires_gradient_sync(index == count)
            losses.append(self._loss(pair))
            (losses[-1] / count).backward()
        return mean(losses)

    def _train_slots(self, step: int) -> float:
        losses: list[Tensor] = []
        for slot in self.slots.each_slot(self.model, step=step):
            (pair,) = self._batches(slot).micro_batches(step, 1)
            losses.append(self._loss(pair))
            losses[-1].backward()
        return float(self.slots.mean(self.model, losses))

    def clip(self) -> float:
        """Clip all gradients; their norm before that. A guard names those that are not finite."""
        parameters = list(self.model.parameters())
        norm = self.norm(parameters)
        if bool(norm.isfinite()):
            clip_grads_with_norm_(parameters, self.settings.clip, norm)
        return float(norm)

    @torch.no_grad()
    def held_out(self) -> float:
        """Mean held-out loss over all ranks, nats per byte: each reads its parts of the rows."""
        self.model.eval()
        pairs = (self._batches(part).held_out(self.settings.eval_batches) for part in self._own)
        loss = mean([self._loss(pair) for some in pairs for pair in some])
        self.model.train()
        return loss

    @property
    def _own(self) -> range:
        """The parts of this rank."""
        given = self.settings
        count = (given.reproducible or given.data_ranks) // given.data_ranks
        first = self.place.rank // given.tp * count
        return range(first, first + count)

    def _batches(self, part: int) -> Batches:
        given = self.settings
        parts = given.reproducible or given.data_ranks
        return Batches(self.corpus, given.batch, given.sequence, given.seed, part, parts)

    def _loss(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy in float32, nats per byte, of inputs and targets (B, T), int64."""
        inputs, targets = (tensor.to(self.place.device) for tensor in pair)
        logits: Tensor = self.model(inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
