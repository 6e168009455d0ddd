"""What a rank computes in a step, and what ranks add up: gradients, losses, norms.

Two ways. Usually every rank takes its share of the rows of a step, and sums are made over ranks
(`RankPasses`). With ``--reproducible`` rows go by slots and every sum has an order of its own, so
that results are the same bits at every number of ranks (`SlotPasses`).
"""

import random
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from polyshard.clipping import clip_grads_with_norm_
from polyshard_demo.engine import Engine, clip_gradients
from polyshard_demo.model import LanguageModel
from polyshard_demo.plugins import package_of, slot_sampler
from polyshard_demo.settings import Settings
from polyshard_demo.text import Batches, Corpus, Windows
from polyshard_demo.worker import Worker
from polyshard_resilience import NonFinite

__all__ = ["Passes", "RankPasses", "SlotPasses"]

Pair = tuple[Tensor, Tensor]
"""Inputs and targets, each int64, shape (B, T)."""


class Passes(Protocol):
    """What the training loop needs of them."""

    def train(self, step: int) -> float:
        """Leave the gradients of a step; the mean loss over all of its rows, nats per byte."""
        ...

    def clip(self) -> float:
        """Clip all gradients; their norm before that."""
        ...

    def held_out(self) -> float:
        """Mean held-out loss over all ranks, nats per byte."""
        ...


@dataclass(frozen=True)
class RankPasses:
    """Each rank has its share of the rows of a step."""

    settings: Settings
    worker: Worker
    engine: Engine
    model: LanguageModel
    batches: Batches
    finite: NonFinite | None = None

    @staticmethod
    def start(
        settings: Settings,
        worker: Worker,
        engine: Engine,
        model: LanguageModel,
        corpus: Corpus,
        finite: NonFinite | None,
    ) -> "RankPasses":
        """Those of a run; ranks that share layers share their rows."""
        batches = Batches(
            corpus,
            settings.batch,
            settings.sequence,
            settings.seed,
            worker.rank // settings.tp,
            settings.data_ranks,
        )
        return RankPasses(settings, worker, engine, model, batches, finite)

    def train(self, step: int) -> float:
        """Accumulate the gradients of all micro-batches."""
        count = self.settings.accumulate
        total = torch.zeros((), device=self.worker.device)
        for index, pair in enumerate(self.batches.micro_batches(step, count), 1):
            self._draw(step, index)
            self.engine.sync_gradients(self.model, index == count)
            loss = _loss(self.model, pair, self.worker.device) / count
            loss.backward()
            total += loss.detach()
        return self.worker.mean(total)

    def clip(self) -> float:
        """A finite norm tells the guard that all gradients are."""
        if self.finite is not None:
            return float(self.finite.clip_grad_norm_(self.settings.clip))
        return clip_gradients(self.model, self.settings.clip)

    def held_out(self) -> float:
        """Every rank reads its share of the same rows."""
        device = self.worker.device
        pairs = self.batches.held_out(self.settings.eval_batches)
        losses = [_loss(self.model, pair, device) for pair in pairs]
        return self.worker.mean(torch.stack(losses).double().mean())

    def _draw(self, step: int, index: int) -> None:
        """Dropout follows from seed, step and data: ranks that share both leave out the same."""
        if self.settings.dropout:
            keys = (self.settings.seed, step, self.batches.rank, index)
            torch.manual_seed(random.Random(f"dropout/{keys}").getrandbits(63))


@dataclass(frozen=True)
class SlotPasses:
    """Rows of a step go by slots; which rank runs a slot changes nothing.

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
    model: LanguageModel
    plugin: Any
    windows: Windows
    sampler: Any

    @staticmethod
    def start(
        settings: Settings, worker: Worker, model: LanguageModel, plugin: Any, corpus: Corpus
    ) -> "SlotPasses":
        """Those of a run."""
        windows = Windows(corpus, settings.sequence)
        slots = settings.reproducible
        sampler = slot_sampler(windows, settings.batch, slots, settings.seed)
        return SlotPasses(settings, worker, model, plugin, windows, sampler)

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
        norm: Tensor = package_of("--reproducible").grad_norm(parameters)
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


def _loss(model: LanguageModel, pair: Pair, device: torch.device) -> Tensor:
    """Mean cross-entropy in float32, nats per byte."""
    inputs, targets = pair
    logits: Tensor = model(inputs.to(device))
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.to(device).flatten())
