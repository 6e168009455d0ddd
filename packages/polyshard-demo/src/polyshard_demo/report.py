"""The final report: a table, ``report.json`` and the loss curve ``loss.png``."""

import io
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from polyshard.files import replace_file
from polyshard_demo.engine import Wire
from polyshard_demo.history import History
from polyshard_demo.settings import Settings
from polyshard_demo.text import Corpus
from polyshard_demo.worker import Memory

__all__ = ["Report", "draw", "write_report"]

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a finished run has to say.

    Attributes:
        settings: Options of the run.
        corpus: The text.
        parameters: Elements in the whole model.
        history: Steps and evaluations, those before a resume included.
        memory: Peak memory of each rank.
        wire: Bytes each rank moved since it started; None where the engine does not count.
        before: Resident memory of each rank before its first step, without its part of the model.
        step_wire: Bytes each rank moved in the last step; None as above, or without a step.
    """

    settings: Settings
    corpus: Corpus
    parameters: int
    history: History
    memory: Sequence[Memory]
    wire: Sequence[Wire | None]
    before: Sequence[int]
    step_wire: Sequence[Wire | None]

    @property
    def held_out(self) -> float | None:
        """Last held-out loss, nats per byte."""
        evaluations = self.history.evaluations
        return evaluations[-1].loss if evaluations else None

    def to_plain(self) -> dict[str, Any]:
        """JSON-ready data; times in seconds, losses in nats per byte, sizes in bytes."""
        return {
            "settings": self.settings.to_plain(),
            "environment": {
                "torch": torch.__version__,
                "python": platform.python_version(),
                "threads_per_rank": torch.get_num_threads(),
            },
            "text": {
                "name": self.corpus.name,
                "digest": self.corpus.digest,
                "train_bytes": len(self.corpus.train),
                "held_out_bytes": len(self.corpus.held_out),
                "unigram_entropy": self.corpus.entropy,
            },
            "parameters": self.parameters,
            "held_out_loss": self.held_out,
            "training_seconds": self.history.seconds,
            "tokens_per_second": self.history.speed,
            "ranks": [
                {
                    "memory": memory._asdict() | {"before_bytes": before},
                    "wire": wire._asdict() if wire else None,
                    "step_wire": last._asdict() if last else None,
                }
                for memory, before, wire, last in zip(
                    self.memory, self.before, self.wire, self.step_wire, strict=True
                )
            ],
            **self.history.state_dict(),
        }


def write_report(report: Report, directory: Path) -> None:
    """Write both files and print the table."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report.to_plain(), indent=1) + "\n"
    replace_file(directory / "report.json", text.encode())
    draw(report, directory / "loss.png")
    console = Console(highlight=False)
    console.print(table(report))
    console.print(f"written to {directory}: report.json, loss.png, checkpoints", soft_wrap=True)


def table(report: Report) -> Table:
    """The run at a glance."""
    settings, history = report.settings, report.history
    rows = Table(title=f"{settings.engine}, {settings.ranks} ranks, {settings.preset}")
    rows.add_column("what")
    rows.add_column("value", justify="right")
    rows.add_row("steps", f"{history.last:,}")
    if history.steps:
        rows.add_row("training loss, first step", f"{history.steps[0].loss:.4f} nats/byte")
        rows.add_row("training loss, last step", f"{history.steps[-1].loss:.4f} nats/byte")
    if report.held_out is not None:
        rows.add_row("held-out loss", f"{report.held_out:.4f} nats/byte")
    rows.add_row("unigram entropy of the text", f"{report.corpus.entropy:.4f} nats/byte")
    rows.add_row("training time", f"{history.seconds:,.1f} s")
    rows.add_row("throughput (median step)", f"{history.speed:,.0f} tokens/s")
    for rank, (memory, wire) in enumerate(zip(report.memory, report.wire, strict=True)):
        rows.add_row(f"rank {rank}: peak memory", _memory_text(memory))
        rows.add_row(f"rank {rank}: on the wire", _wire_text(wire))
    return rows


def draw(report: Report, path: Path) -> None:
    """Loss and throughput over the steps, as a PNG; needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    losses, speeds = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    history = report.history
    steps = [step.step for step in history.steps]
    losses.plot(steps, [step.loss for step in history.steps], lw=1, label="training batch")
    losses.plot(
        [found.step for found in history.evaluations],
        [found.loss for found in history.evaluations],
        "o-",
        label="held-out text",
    )
    losses.axhline(
        report.corpus.entropy, color="black", ls="--", lw=1, label="unigram entropy of the text"
    )
    losses.set_ylabel("loss (nats per byte)")
    losses.set_title(_title(report))
    losses.legend()
    losses.grid(alpha=0.3)
    speeds.plot(steps, [step.speed for step in history.steps], lw=1, color="tab:green")
    speeds.set_ylim(bottom=0)
    speeds.set_ylabel("tokens per second")
    speeds.set_xlabel("optimizer step")
    speeds.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    replace_file(path, picture.getvalue())


def _title(report: Report) -> str:
    settings = report.settings
    precision = "bf16" if settings.bf16 else "fp32"
    return (
        f"{report.parameters / 1e6:.2f} M parameters on {report.corpus.name}, "
        f"{settings.engine} engine, {settings.ranks} ranks, {precision}"
    )


def _memory_text(memory: Memory) -> str:
    text = f"{memory.resident_bytes / MIB:,.0f} MiB"
    if memory.device_bytes is not None:
        text += f" + {memory.device_bytes / MIB:,.0f} MiB device"
    return text


def _wire_text(wire: Wire | None) -> str:
    if wire is None:
        return "not counted by this engine"
    return f"{wire.sent / MIB:,.1f} MiB sent, {wire.received / MIB:,.1f} MiB received"
