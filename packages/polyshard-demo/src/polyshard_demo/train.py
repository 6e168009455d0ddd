"""The training loop of one rank."""

import math
import platform
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.distributed.tensor import DTensor

from polyshard_checkpoint import Checkpoints, Restored, TrainingState
from polyshard_cli.compare.engines.built import Built, Place
from polyshard_cli.compare.training.memory import resident
from polyshard_cli.trace import Trace, merge
from polyshard_cli.trace.reading.table import show_merged
from polyshard_demo.checkpoint import folder_of, restore, write_run
from polyshard_demo.engine import build, plugins_of, reproducible
from polyshard_demo.errors import DemoError
from polyshard_demo.model import LanguageModel, shape_of
from polyshard_demo.page import write_page
from polyshard_demo.passes import Passes
from polyshard_demo.ranks import gather, join
from polyshard_demo.report import Evaluation, History, Step, write_report
from polyshard_demo.settings import Settings
from polyshard_demo.text import Corpus, load_corpus
from polyshard_resilience import Corruption, NonFinite

__all__ = ["Trainer", "learning_rate", "run_worker"]

WARMUP_FRACTION = 0.05
FINAL_FRACTION = 0.1


def run_worker(settings: Settings) -> None:
    """Train as the rank that the launcher's environment says this process is."""
    corpus, console = load_corpus(settings.text, settings.sequence), Console(highlight=False)
    with join(settings) as place:
        # A default run directory is named after the time, which differs between ranks.
        out = gather(settings.out)[0]
        settings = replace(settings, ranks=place.ranks, out=out)
        report = Trainer.start(settings, place, corpus).run()
        if place.rank == 0:
            write_report(report, settings.out, console)
            if settings.trace is not None:  # all ranks have closed their files: they have reported
                show_merged(merge(settings.trace, settings.trace / "trace.json"), console)
    if place.rank == 0 and settings.page:  # a plan is made without a process group
        console.print(write_page(settings), soft_wrap=True)


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
    corpus: Corpus
    built: Built
    passes: Passes
    history: History
    restored: Restored | None
    around: tuple[AbstractContextManager[object], ...]
    """What watches the steps: a trace, a recorder."""

    @staticmethod
    def start(settings: Settings, place: Place, corpus: Corpus) -> "Trainer":
        """Build and shard the model; with ``resume``, fill it from the checkpoint."""
        plugins = plugins_of(settings)
        trace = None if settings.trace is None else Trace(settings.trace)
        # Every rank draws the same weights, then keeps its part. That makes the start independent
        # of engine, world size and device.
        torch.manual_seed(settings.seed)
        every = plugins if trace is None else [*plugins, trace]
        built = build(settings, place, LanguageModel(shape_of(settings)), every)
        model, optimizer = built.model, built.optimizer
        if settings.guards:  # the optimizer keeps both
            Corruption(model, optimizer)
            NonFinite(optimizer, model=model)
        passes, history = Passes(settings, place, model, corpus), History()
        if settings.reproducible:
            passes = replace(passes, slots=plugins[-1], norm=reproducible().grad_norm)
        around: list[AbstractContextManager[object]] = []
        if trace is not None:
            around.append(trace.recording(model, optimizer))
        if (folder := settings.record) is not None:
            around.append(reproducible().Recorder(folder, passes.slots, model, optimizer))
        restored = restore(settings, corpus, _state(built, history))
        return Trainer(settings, corpus, built, passes, history, restored, tuple(around))

    def run(self) -> dict[str, Any]:
        """Train to the last step, with evaluations and checkpoints on the way; the report."""
        settings, place, history = self.settings, self.passes.place, self.history
        if place.rank == 0:
            write_run(settings, self.corpus)
        before, count = resident("VmRSS:") - _held_bytes(self.built.model), self.built.counted
        step_sent: int | None = None
        say = Console(quiet=place.rank > 0, soft_wrap=True, highlight=False, markup=False).print
        for line in self._introduction():
            say(line)
        first, begun = history.last, time.monotonic()
        folder, state = folder_of(settings.out), _state(self.built, history)
        with ExitStack() as stack, Checkpoints(folder) as checkpoints:
            for context in self.around:
                stack.enter_context(context)
            for step in range(first + 1, settings.steps + 1):
                sent = count() if count else 0
                done = self.train_step(step)
                step_sent = count() - sent if count else None
                history.steps.append(done)
                if step == 1 or _due(step, settings.log_every, settings.steps):
                    pace = (time.monotonic() - begun) / (step - first)
                    say(done.line(settings.steps, resident("VmHWM:"), pace))
                if _due(step, settings.eval_every, settings.steps):
                    history.evaluations.append(Evaluation(step, self.passes.held_out()))
                    say(history.evaluations[-1].line(self.corpus.entropy))
                if _due(step, settings.checkpoint_every, settings.steps):
                    checkpoints.save_async(step, state)
                    say(f"saving step {step} in {folder}")
        return self._report(before, step_sent)

    def _report(self, before_bytes: int, step_sent_bytes: int | None) -> dict[str, Any]:
        """What ``report.json`` holds; on every rank.

        Of each rank, ``resident_bytes`` and ``device_bytes`` (``None`` on the CPU) are peaks;
        ``before_bytes`` is resident before the first step and without the rank's part of the model;
        ``sent_bytes``, since the start, and ``step_sent_bytes``, in the last step, are ``None``
        where the engine does not count.
        """
        place, corpus, history = self.passes.place, self.corpus, self.history
        on_cpu = place.device.type == "cpu"
        figures = {
            "resident_bytes": resident("VmHWM:"),
            "device_bytes": None if on_cpu else torch.accelerator.max_memory_allocated(),
            "before_bytes": before_bytes,
            "sent_bytes": self.built.counted() if self.built.counted else None,
            "step_sent_bytes": step_sent_bytes,
        }
        return {
            "settings": self.settings.to_plain(),
            "environment": {
                "torch": torch.__version__,
                "python": platform.python_version(),
                "threads_per_rank": torch.get_num_threads(),
            },
            "text": {
                "name": corpus.name,
                "digest": corpus.digest,
                "train_bytes": len(corpus.train),
                "held_out_bytes": len(corpus.held_out),
                "unigram_entropy": corpus.entropy,
            },
            "parameters": self._parameters,
            "held_out_loss": history.evaluations[-1].loss if history.evaluations else None,
            "training_seconds": sum(step.seconds for step in history.steps),
            "tokens_per_second": median([step.speed for step in history.steps] or [0.0]),
            "ranks": gather(figures),
            **history.state_dict(),
        }

    def train_step(self, step: int) -> Step:
        """One optimizer step over the global batch of that step."""
        started = time.perf_counter()
        lr = learning_rate(self.settings, step)
        for group in self.built.optimizer.param_groups:
            group["lr"] = lr
        loss = self.passes.train(step)
        norm = self.passes.clip()
        self.built.optimizer.step()
        self.built.optimizer.zero_grad()
        if not math.isfinite(loss):
            raise DemoError(f"the loss became {loss} at step {step}; try a lower --lr than {lr:g}")
        tokens = self.settings.batch * self.settings.sequence
        return Step(step, loss, norm, lr, tokens, time.perf_counter() - started)

    @property
    def _parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.built.model.parameters())

    def _introduction(self) -> Iterator[str]:
        corpus, settings, place = self.corpus, self.settings, self.passes.place
        yield (
            f"text {corpus.name}: {len(corpus.train):,} bytes to train on, "
            f"{len(corpus.held_out):,} held out, unigram entropy {corpus.entropy:.4f} nats/byte"
        )
        yield (
            f"model {settings.preset}: {self._parameters:,} parameters, engine {settings.engine}, "
            f"{place.ranks} ranks on {place.device.type}"
        )
        if self.built.plan is not None:
            yield self.built.plan()
        if self.restored is not None:
            yield f"going on after step {self.history.last}, from {self.restored.path}"
            yield from self.restored.notes


def _state(built: Built, history: History) -> TrainingState:
    """What a checkpoint holds. Batches follow from the seed and the step; nothing is drawn."""
    shared = {"history": history}
    return TrainingState(built.model, [built.optimizer], shared=shared, random=False)


def _held_bytes(model: nn.Module) -> int:
    """What this rank holds of the parameters, where that is resident memory."""
    held = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(tensor.nbytes for tensor in held if tensor.device.type == "cpu")


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
