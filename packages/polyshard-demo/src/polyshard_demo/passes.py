"""What a rank computes in a step, and what ranks add up: gradients, losses, norms.

Two ways. Usually every rank takes its share of the rows of a step, and sums are made over ranks
(`RankPasses`). With ``--reproducible`` rows go by slots and every sum has an order of its own, so
that results are the same bits at every number of ranks (`SlotPasses`).
"""

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyshard.clipping import clip_grad_norm_, clip_grads_with_norm_
from polyshard_demo.plugins import reproducible
from polyshard_demo.settings import Settings
from polyshard_demo.text import Batches, Corpus, Windows
from polyshard_demo.worker import Worker
from polyshard_resilience import NonFinite

__all__ = ["Passes", "RankPasses", "SlotPasses"]

Pair = tuple[Tensor, Tensor]
"""Inputs and targets, each int64, shape (B, T)."""


@dataclass(frozen=True)
class RankPasses:
    """Each rank has its share of the rows of a step; ranks that share layers share their rows.

    Attributes:
        settings: of the run.
        worker: this rank.
        model: sharded.
        corpus: the text.
        finite: the guard of steps, where there is one.
    """

    settings: Settings
    worker: Worker
    model: Any
    corpus: Corpus
    finite: NonFinite | None = None

    @property
    def batches(self) -> Batches:
        """This rank's rows."""
        given = self.settings
        rank, ranks = self.worker.rank // given.tp, given.data_ranks
        return Batches(self.corpus, given.batch, given.sequence, given.seed, rank, ranks)

    def train(self, step: int) -> float:
        """Leave the gradients of a step; the mean loss over all of its rows, nats per byte."""
        count, device = self.settings.accumulate, self.worker.device
        total = torch.zeros((), device=device)
        for index, pair in enumerate(self.batches.micro_batches(step, count), 1):
            self._draw(step, index)
            if self.settings.engine != "single":
                self.model.set_requires_gradient_sync(index == count)
            loss = _loss(self.model, pair, device) / count
            loss.backward()
            total += loss.detach()
        return self.worker.mean(total)

    def clip(self) -> float:
        """Clip all gradients; their norm before that, which tells the guard if all are finite."""
        largest = self.settings.clip
        if self.finite is not None:
            return float(self.finite.clip_grad_norm_(largest))
        return float(clip_grad_norm_(self.model.parameters(), largest))

    def held_out(self) -> float:
        """Mean held-out loss over all ranks, nats per byte: each reads its share of the rows."""
        pairs = self.batches.held_out(self.settings.eval_batches)
        losses = [_loss(self.model, pair, self.worker.device) for pair in pairs]
        return self.worker.mean(torch.stack(losses).double().mean())

    def _draw(self, step: int, index: int) -> None:
        """Dropout follows from seed, step and data: ranks that share both leave out the same."""
        if self.settings.dropout:
            keys = (self.settings.seed, step, self.batches.rank, index)
            torch.manual_seed(random.Random(f"dropout/{keys}").getrandbits(63))


@dataclass(frozen=True)
class SlotPasses:
    """The same by slots; which rank runs a slot changes nothing.

    Attributes:
        settings: of the run.
        worker: this rank.
        model: sharded with the plugin.
        plugin: ``polyshard_reproducible.Reproducible``.
        windows: the text.
        sampler: ``polyshard_reproducible.SlotSampler`` over its windows.
    """

    settings: Settings
    worker: Worker
    model: Any
    plugin: Any
    windows: Windows
    sampler: Any

    def train(self, step: int) -> float:
        """Run the slots of this rank; the plugin adds up what they give."""
        losses = []
        for slot in self.plugin.each_slot(self.model, step=step):
            rows = self.windows.rows(self.sampler.indices(step - 1, slot))
            losses.append(_loss(self.model, rows, self.worker.device))
            losses[-1].backward()
        return float(self.plugin.mean(self.model, losses))

    def clip(self) -> float:
        """Gradients that are not finite stay as they are, so that a guard can name them."""
        parameters = list(self.model.parameters())
        norm: Tensor = reproducible().grad_norm(parameters)
        if not self.settings.guards or bool(norm.isfinite()):
            clip_grads_with_norm_(parameters, self.settings.clip, norm)
        return float(norm)

    def held_out(self) -> float:
        """Pieces of the shape of a slot, whoever reads them, and one rounding of their mean."""
        settings, rows = self.settings, self.settings.batch // self.settings.reproducible
        share = settings.eval_batches * settings.reproducible // settings.data_ranks
        first = self.worker.rank // settings.tp * share
        pieces = self.windows.held_out(
            settings.eval_batches * settings.batch, rows, range(first, first + share)
        )
        device = self.worker.device
        return self.worker.exact_mean([float(_loss(self.model, p, device)) for p in pieces])


Passes = RankPasses | SlotPasses


def _loss(model: Any, pair: Pair, device: torch.device) -> Tensor:
    """Mean cross-entropy in float32, nats per byte."""
    inputs, targets = pair
    logits: Tensor = model(inputs.to(device))
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.to(device).flatten())
