"""The training loop of one rank."""

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.distributed.tensor import DTensor

from polyshard.errors import CheckpointError
from polyshard_checkpoint import Checkpoints, Restored, TrainingState
from polyshard_cli.compare.engines.built import Built
from polyshard_cli.compare.training.memory import resident
from polyshard_cli.trace import Trace
from polyshard_demo.checkpoint import (
    Source,
    find_source,
    folder_of,
    has_checkpoints,
    write_run,
)
from polyshard_demo.engine import build
from polyshard_demo.errors import DemoError
from polyshard_demo.history import Evaluation, History, Step
from polyshard_demo.model import LanguageModel, shape_of
from polyshard_demo.page import write_page
from polyshard_demo.passes import Passes, RankPasses, SlotPasses
from polyshard_demo.plugins import merge_trace, reproducible, reproducible_plugin, slot_sampler
from polyshard_demo.progress import Display
from polyshard_demo.report import report_of, write_report
from polyshard_demo.settings import Settings
from polyshard_demo.text import Corpus, Windows, load_corpus
from polyshard_demo.worker import Worker, fix_kernels, join
from polyshard_resilience import Corruption, NonFinite

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
        if settings.reproducible:
            fix_kernels(worker.device)
        trainer = Trainer.start(settings, worker, corpus)
        report = trainer.run()
        if worker.leads:
            write_report(report, settings.out)
            if settings.trace is not None:  # all ranks have closed their files: they have reported
                Console(highlight=False).print(merge_trace(settings.trace), soft_wrap=True)
    if worker.leads and settings.page:  # a plan is made without a process group
        Console(highlight=False).print(write_page(settings), soft_wrap=True)


def check_output(settings: Settings) -> None:
    """Refuse to mix a new run's checkpoints with those of an older one."""
    if settings.resume is None and has_checkpoints(settings.out):
        raise DemoError(
            f"--out {settings.out} already holds checkpoints; resume from them with "
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
    built: Built
    passes: Passes
    history: History
    restored: Restored | None = None
    recorder: AbstractContextManager[object] = field(default_factory=nullcontext)
    tracing: AbstractContextManager[object] = field(default_factory=nullcontext)

    @staticmethod
    def start(settings: Settings, worker: Worker, corpus: Corpus) -> "Trainer":
        """Build and shard the model; with ``resume``, fill it from the checkpoint."""
        plugin = (
            reproducible_plugin(settings.reproducible, settings.seed)
            if settings.reproducible
            else None
        )
        trace = None if settings.trace is None else Trace(settings.trace)
        more = [one for one in (plugin, trace) if one is not None]
        # Every rank draws the same weights, then keeps its part. That makes the start independent
        # of engine, world size and device.
        torch.manual_seed(settings.seed)
        model = LanguageModel(shape_of(settings))
        built = build(settings, worker.device, model, lambda made: _adamw(made, settings), *more)
        finite = _guards(built) if settings.guards else None
        passes: Passes = RankPasses(settings, worker, built.model, corpus, finite)
        trainer = Trainer(settings, worker, corpus, built, passes, History())
        if plugin is not None:
            trainer = trainer._in_slots(plugin)
        if trace is not None:
            trainer = replace(trainer, tracing=trace.recording(built.model, built.optimizer))
        source = find_source(settings)
        return trainer if source is None else replace(trainer, restored=trainer._resumed(source))

    @property
    def model(self) -> Any:
        """As it is sharded."""
        return self.built.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of its parameters."""
        return self.built.optimizer

    def run(self) -> dict[str, Any]:
        """Train to the last step, with evaluations and checkpoints on the way; the report."""
        first, settings, silent = self.history.last, self.settings, not self.worker.leads
        if self.worker.leads:
            write_run(settings, self.corpus)
        before = resident("VmRSS:") - _held_bytes(self.model)
        step_sent: int | None = None
        display = Display(first, settings.steps, settings.log_every, silent=silent)
        self._introduce(display)
        with self.tracing, self.recorder, Checkpoints(folder_of(settings.out)) as checkpoints:
            for step in range(first + 1, settings.steps + 1):
                sent = self._sent() if step == settings.steps else None
                done = self.train_step(step)
                step_sent = None if sent is None else (self._sent() or 0) - sent
                self.history.steps.append(done)
                display.step(done, resident("VmHWM:"))
                if _due(step, settings.eval_every, settings.steps):
                    self._evaluate(step, display)
                if _due(step, settings.checkpoint_every, settings.steps):
                    checkpoints.save_async(step, self._state)
                    display.say(f"saving step {step} in {folder_of(settings.out)}")
        device = self.worker.device
        ranks = self.worker.gather(
            {
                "resident_bytes": resident("VmHWM:"),
                "device_bytes": None
                if device.type == "cpu"
                else torch.accelerator.max_memory_allocated(device),
                "before_bytes": before,
                "sent_bytes": self._sent(),
                "step_sent_bytes": step_sent,
            }
        )
        return report_of(settings, self.corpus, self._parameters, self.history, ranks)

    def train_step(self, step: int) -> Step:
        """One optimizer step over the global batch of that step."""
        started = time.perf_counter()
        lr = learning_rate(self.settings, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self.passes.train(step)
        norm = self.passes.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not math.isfinite(loss):
            raise DemoError(f"the loss became {loss} at step {step}; try a lower --lr than {lr:g}")
        tokens = self.settings.batch * self.settings.sequence
        return Step(step, loss, norm, lr, tokens, time.perf_counter() - started)

    def evaluate(self) -> float:
        """Mean held-out loss over all ranks, nats per byte."""
        self.model.eval()
        with torch.no_grad():
            loss = self.passes.held_out()
        self.model.train()
        return loss

    def _in_slots(self, plugin: Any) -> "Trainer":
        """The same, for a plugin that keeps results the same bits, with what ``--record`` asks."""
        given, windows = self.settings, Windows(self.corpus, self.settings.sequence)
        sampler = slot_sampler(windows, given.batch, given.reproducible, given.seed)
        passes = SlotPasses(given, self.worker, self.model, plugin, windows, sampler)
        package = reproducible()
        package.check_optimizer(self.optimizer)
        if given.record is None:
            return replace(self, passes=passes)
        recorder = package.Recorder(given.record, plugin, self.model, self.optimizer)
        return replace(self, passes=passes, recorder=recorder)

    @property
    def _parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def _sent(self) -> int | None:
        """Bytes that this rank has put on the wire, or ``None`` if the engine does not count."""
        return self.built.counted() if self.built.counted else None

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
        corpus, settings = self.corpus, self.settings
        display.say(
            f"text {corpus.name}: {len(corpus.train):,} bytes to train on, "
            f"{len(corpus.held_out):,} held out, unigram entropy {corpus.entropy:.4f} nats/byte"
        )
        display.say(
            f"model {settings.preset}: {self._parameters:,} parameters, engine {settings.engine}, "
            f"{self.worker.world_size} ranks on {self.worker.device.type}"
        )
        if self.built.plan is not None:
            display.say(self.built.plan())
        if settings.record is not None:
            display.say(f"recording digests of every step in {settings.record}")
        if settings.trace is not None:
            display.say(f"tracing every step in {settings.trace}")
        if self.restored is not None:
            display.say(f"going on after step {self.history.last}, from {self.restored.path}")
            for note in self.restored.notes:
                display.say(note)


def _guards(built: Built) -> NonFinite:
    """Guard steps and memory; the optimizer keeps both guards."""
    Corruption(built.model, built.optimizer)
    return NonFinite(built.optimizer, model=built.model)


def _adamw(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW that decays matrices and leaves vectors alone."""

    def having(matrix: bool) -> Iterator[nn.Parameter]:
        return (found for found in model.parameters() if (found.ndim > 1) is matrix)

    groups = [
        {"params": list(having(matrix=True)), "weight_decay": settings.weight_decay},
        {"params": list(having(matrix=False)), "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95))


def _held_bytes(model: nn.Module) -> int:
    """What this rank holds of the parameters, where that is resident memory."""
    held = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(tensor.nbytes for tensor in held if tensor.device.type == "cpu")


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
