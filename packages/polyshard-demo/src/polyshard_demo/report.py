"""What a run has measured, and the final report: a table, ``report.json`` and ``loss.png``.

All of it, and the page, is made of one mapping, which is what ``report.json`` holds: times in
seconds, losses in nats per byte, sizes in bytes.
"""

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from polyshard.files import replace_file

__all__ = ["Evaluation", "History", "Step", "write_report"]

MIB = 1 << 20
ENTROPY = "unigram entropy of the text"


@dataclass(frozen=True)
class Step:
    """One optimizer step."""

    step: int  # counted from 1
    loss: float  # mean over all ranks and micro-batches, nats per byte
    norm: float  # of all gradients before clipping
    lr: float  # learning rate used
    tokens: int  # bytes of text over all ranks
    seconds: float  # wall time on rank 0

    @property
    def speed(self) -> float:
        """Tokens per second over all ranks."""
        return self.tokens / self.seconds

    def line(self, steps: int, resident_bytes: int, pace: float) -> str:
        """For people: this step of ``steps``, and what is left where one takes ``pace`` seconds."""
        now = f"loss {self.loss:.4f}  {self.speed:>8,.0f} tokens/s  {resident_bytes / MIB:,.0f} MiB"
        seconds = round(pace * (steps - self.step))
        left = f"  {timedelta(seconds=seconds)} left" if seconds else ""
        return f"step {self.step:>5}/{steps}  {now}{left}"


@dataclass(frozen=True)
class Evaluation:
    """Mean loss on held-out text after a step, nats per byte."""

    step: int
    loss: float

    def line(self, entropy: float) -> str:
        """For people, beside what a model without context reaches."""
        after = f"held-out after step {self.step}: {self.loss:.4f} nats/byte"
        return f"{after} (unigram entropy {entropy:.4f})"


@dataclass
class History:
    """All steps and evaluations of a run, those before a resume included."""

    steps: list[Step] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)

    @property
    def last(self) -> int:
        """Number of the last finished step; 0 before the first."""
        return self.steps[-1].step if self.steps else 0

    def state_dict(self) -> dict[str, Any]:
        """Plain data, for checkpoints and reports."""
        return asdict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` gave."""
        self.steps[:] = [Step(**step) for step in state_dict["steps"]]
        self.evaluations[:] = [Evaluation(**found) for found in state_dict["evaluations"]]


def write_report(found: Mapping[str, Any], directory: Path, console: Console) -> None:
    """Write both files and print the table."""
    replace_file(directory / "report.json", f"{json.dumps(found, indent=1)}\n".encode())
    replace_file(directory / "loss.png", _drawn(found))
    console.print(_table(found))
    console.print(f"written to {directory}: report.json, loss.png, checkpoints", soft_wrap=True)


def _table(found: Mapping[str, Any]) -> Table:
    """The run at a glance."""
    settings, steps = found["settings"], found["steps"]
    rows = Table(title=f"{settings['engine']}, {settings['ranks']} ranks, {settings['preset']}")
    rows.add_column("what")
    rows.add_column("value", justify="right")
    rows.add_row("steps", f"{len(steps):,}")
    losses = {
        "training loss, first step": steps[0]["loss"] if steps else None,
        "training loss, last step": steps[-1]["loss"] if steps else None,
        "held-out loss": found["held_out_loss"],
        ENTROPY: found["text"]["unigram_entropy"],
    }
    for name, loss in losses.items():
        if loss is not None:
            rows.add_row(name, f"{loss:.4f} nats/byte")
    rows.add_row("training time", f"{found['training_seconds']:,.1f} s")
    rows.add_row("throughput (median step)", f"{found['tokens_per_second']:,.0f} tokens/s")
    for number, rank in enumerate(found["ranks"]):
        memory = f"{rank['resident_bytes'] / MIB:,.0f} MiB"
        if rank["device_bytes"] is not None:
            memory += f" + {rank['device_bytes'] / MIB:,.0f} MiB device"
        sent = rank["sent_bytes"]
        wire = "not counted by this engine" if sent is None else f"{sent / MIB:,.1f} MiB sent"
        rows.add_row(f"rank {number}: peak memory", memory)
        rows.add_row(f"rank {number}: on the wire", wire)
    return rows


def _drawn(found: Mapping[str, Any]) -> bytes:
    """Loss and throughput over the steps, as a PNG; needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    losses, speeds = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    steps, held_out = found["steps"], found["evaluations"]
    settings, text = found["settings"], found["text"]
    numbers, after = ([row["step"] for row in rows] for rows in (steps, held_out))
    losses.plot(numbers, [row["loss"] for row in steps], lw=1, label="training batch")
    losses.plot(after, [row["loss"] for row in held_out], "o-", lw=1.5, label="held-out text")
    losses.axhline(text["unigram_entropy"], color="black", ls="--", lw=1, label=ENTROPY)
    losses.set_title(
        f"{found['parameters'] / 1e6:.2f} M parameters on {text['name']}, {settings['engine']} "
        f"engine, {settings['ranks']} ranks, {'bf16' if settings['bf16'] else 'fp32'}"
    )
    losses.set_ylabel("loss (nats per byte)")
    losses.legend()
    speeds.plot(numbers, [row["tokens"] / row["seconds"] for row in steps], lw=1, color="tab:green")
    speeds.set_ylim(bottom=0)
    speeds.set_ylabel("tokens per second")
    speeds.set_xlabel("optimizer step")
    for axes in (losses, speeds):
        axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
