"""The training loop of one rank."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyshard.checkpoint import Checkpoints, Restored, TrainingState
from polyshard.errors import CheckpointError
from polyshard.guards import Corruption, NonFinite
from polyshard_demo.checkpoint import (
    Source,
    find_source,
    folder_of,
    has_checkpoints,
    write_run,
)
from polyshard_demo.engine import Engine, choose_engine, clip_gradients
from polyshard_demo.errors import DemoError
from polyshard_demo.history import Evaluation, History, Step
from polyshard_demo.model import PRESETS, LanguageModel
from polyshard_demo.progress import Display
from polyshard_demo.report import Report, write_report
from polyshard_demo.settings import Settings
from polyshard_demo.text import Batches, Corpus, load_corpus
from polyshard_demo.worker import Worker, join, peak_memory

__all__ = ["Trainer", "learning_rate", "run_worker"]

WARMUP_FRACTION = 0.05
FINAL_FRACTION = 0.1


def run_worker(settings: Settings) -> None:
    """Train as the rank that the launcher's environment says this process is."""
    corpus = load_corpus(settings.text, settings.sequence)
    with join(settings.device, settings.timeout) as worker:
        # A default run directory is named after the time, which differs between ranks.
        out = worker.gather(settings.out)[0]
        settings = replace(settings, ranks=worker.world_size, out=out)
        trainer = Trainer.start(settings, worker, corpus)
        report = trainer.run()
        if worker.leads:
            write_report(report, settings.out)


def check_output(settings: Settings) -> None:
    """Refuse to mix a new run's checkpoints with those of an older one."""
    if settings.resume is None and has_checkpoints(settings.out):
        raise DemoError(
            f"--out {settings.out} already holds checkpoints; go on from them with "
            f"--resume {settings.out}, or give another --out"
        )


def learning_rate(settings: Settings, step: int) -> float:
    """The rate of a step (from 1): a linear warm-up, then a cosine down to a tenth of the peak."""
    warmup = max(1, int(settings.steps * WARMUP_FRACTION))
    if step <= warmup:
        return settings.lr * step / warmup
    done = (step - warmup) / max(1, settings.steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return settings.lr * (FINAL_FRACTION + (1 - FINAL_FRACTION) * cosine)


@dataclass(frozen=True)
class Trainer:
    """Everything one rank needs to train; `history` grows, the rest stays."""

    settings: Settings
    worker: Worker
    corpus: Corpus
    engine: Engine
    model: LanguageModel
    optimizer: torch.optim.Optimizer
    batches: Batches
    history: History
    restored: Restored | None = None
    finite: NonFinite | None = None

    @staticmethod
    def start(settings: Settings, worker: Worker, corpus: Corpus) -> "Trainer":
        """Build and shard the model; with ``resume``, fill it from the checkpoint."""
        engine = choose_engine(settings, worker.device)
        model = engine.shard(_initial_model(settings))
        trainer = Trainer(
            settings,
            worker,
            corpus,
            engine,
            model,
            engine.wrap(_optimizer(model, settings)),
            Batches(
                corpus,
                settings.batch,
                settings.sequence,
                settings.seed,
                worker.rank // settings.tp,
                settings.data_ranks,
            ),
            History(),
        )
        if settings.guards:
            trainer = trainer._guarded()
        source = find_source(settings)
        return trainer if source is None else replace(trainer, restored=trainer._resumed(source))

    def run(self) -> Report:
        """Train to the last step, with evaluations and checkpoints on the way."""
        first = self.history.last
        settings = self.settings
        silent = not self.worker.leads
        if self.worker.leads:
            write_run(settings, self.corpus)
        with (
            Checkpoints(folder_of(settings.out)) as checkpoints,
            Display(first, settings.steps, settings.log_every, silent=silent) as display,
        ):
            self._introduce(display)
            for step in range(first + 1, settings.steps + 1):
                done = self.train_step(step)
                self.history.steps.append(done)
                display.step(done, peak_memory(self.worker.device).resident_bytes)
                if _due(step, settings.eval_every, settings.steps):
                    self._evaluate(step, display)
                if _due(step, settings.checkpoint_every, settings.steps):
                    checkpoints.save_async(step, self._state)
                    display.say(f"saving step {step} in {folder_of(settings.out)}")
        return self._report()

    def train_step(self, step: int) -> Step:
        """One optimizer step over the global batch of that step."""
        started = time.perf_counter()
        lr = learning_rate(self.settings, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self._backward(step)
        norm = self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = self.worker.mean(loss)
        if not math.isfinite(mean):
            raise DemoError(f"the loss became {mean} at step {step}; try a lower --lr than {lr:g}")
        tokens = self.settings.batch * self.settings.sequence
        return Step(step, mean, norm, lr, tokens, time.perf_counter() - started)

    def evaluate(self) -> float:
        """Mean held-out loss over all ranks, nats per byte."""
        self.model.eval()
        with torch.no_grad():
            losses = [
                self._loss(*pair) for pair in self.batches.held_out(self.settings.eval_batches)
            ]
        self.model.train()
        return self.worker.mean(torch.stack(losses).double().mean())

    def _backward(self, step: int) -> Tensor:
        """Accumulate the gradients of all micro-batches; returns this rank's mean loss."""
        count = self.settings.accumulate
        total = torch.zeros((), device=self.worker.device)
        for index, pair in enumerate(self.batches.micro_batches(step, count), 1):
            self.engine.sync_gradients(self.model, index == count)
            loss = self._loss(*pair) / count
            loss.backward()
            total += loss.detach()
        return total

    def _guarded(self) -> "Trainer":
        """The same, with steps and memory guarded; the optimizer keeps both guards."""
        Corruption(self.model, self.optimizer)
        return replace(self, finite=NonFinite(self.optimizer, model=self.model))

    def _clip(self) -> float:
        """Clip all gradients; their norm before that."""
        if self.finite is not None:
            return float(self.finite.clip_grad_norm_(self.settings.clip))
        return clip_gradients(self.model, self.settings.clip)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in float32, nats per byte; both arguments (B, T), int64."""
        device = self.worker.device
        logits: Tensor = self.model(inputs.to(device))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.to(device).flatten())

    def _evaluate(self, step: int, display: Display) -> None:
        found = Evaluation(step, self.evaluate())
        self.history.evaluations.append(found)
        display.evaluation(found, self.corpus.entropy)

    @property
    def _state(self) -> TrainingState:
        """What a checkpoint holds. Batches follow from the seed and the step; nothing is drawn."""
        return TrainingState(
            self.model, [self.optimizer], shared={"history": self.history}, random=False
        )

    def _resumed(self, source: Source) -> Restored | None:
        """Fill model, optimizer and history from a checkpoint."""
        source.check(self.settings, self.corpus)
        try:
            return Checkpoints(folder_of(source.run)).load(self._state, source.checkpoint)
        except CheckpointError as error:
            raise DemoError(f"cannot resume from {source.run}: {error}") from error

    def _introduce(self, display: Display) -> None:
        corpus, parameters = self.corpus, self.model.parameters()
        display.say(
            f"text {corpus.name}: {len(corpus.train):,} bytes to train on, "
            f"{len(corpus.held_out):,} held out, unigram entropy {corpus.entropy:.4f} nats/byte"
        )
        display.say(
            f"model {self.settings.preset}: {sum(one.numel() for one in parameters):,} parameters, "
            f"engine {self.settings.engine}, {self.worker.world_size} ranks on "
            f"{self.worker.device.type}"
        )
        display.say(self.engine.plan(self.model))
        if self.restored is not None:
            display.say(f"going on after step {self.history.last}, from {self.restored.path}")
            for note in self.restored.notes:
                display.say(note)

    def _report(self) -> Report:
        return Report(
            settings=self.settings,
            corpus=self.corpus,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            history=self.history,
            memory=self.worker.gather(peak_memory(self.worker.device)),
            wire=self.worker.gather(self.engine.wire(self.model)),
        )


def _initial_model(settings: Settings) -> LanguageModel:
    """The whole model on the CPU: every rank draws the same weights, then keeps its part.

    That makes the start independent of engine, world size and device.
    """
    torch.manual_seed(settings.seed)
    shape = replace(PRESETS[settings.preset], sequence=settings.sequence, tied=settings.tied)
    return LanguageModel(shape)


def _optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW that decays matrices and leaves vectors alone."""

    def having(matrix: bool) -> Iterator[nn.Parameter]:
        return (found for found in model.parameters() if (found.ndim > 1) is matrix)

    groups = [
        {"params": list(having(matrix=True)), "weight_decay": settings.weight_decay},
        {"params": list(having(matrix=False)), "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95))


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
