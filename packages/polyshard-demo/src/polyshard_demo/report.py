"""The final report: a table, ``report.json`` and the loss curve ``loss.png``.

All of it, and the page, is made of one mapping, which is what ``report.json`` holds: times in
seconds, losses in nats per byte, sizes in bytes.
"""

import io
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from polyshard.files import replace_file
from polyshard_demo.history import History
from polyshard_demo.settings import Settings
from polyshard_demo.text import Corpus

__all__ = ["report_of", "write_report"]

MIB = 1 << 20


def report_of(
    settings: Settings,
    corpus: Corpus,
    parameters: int,
    history: History,
    ranks: Sequence[Mapping[str, int | None]],
) -> dict[str, Any]:
    """What a finished run has to say.

    Args:
        settings: of the run.
        corpus: the text.
        parameters: elements in the whole model.
        history: steps and evaluations, those before a resume included.
        ranks: of each, ``resident_bytes`` and ``device_bytes`` (``None`` on the CPU), which are
            peaks; ``before_bytes``, resident before the first step and without its part of the
            model; ``sent_bytes`` since the start and ``step_sent_bytes`` in the last step, ``None``
            where the engine does not count.
    """
    evaluations = history.evaluations
    return {
        "settings": settings.to_plain(),
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
        "parameters": parameters,
        "held_out_loss": evaluations[-1].loss if evaluations else None,
        "training_seconds": history.seconds,
        "tokens_per_second": history.speed,
        "ranks": list(ranks),
        **history.state_dict(),
    }


def write_report(found: Mapping[str, Any], directory: Path) -> None:
    """Write both files and print the table."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=1) + "\n"
    replace_file(directory / "report.json", text.encode())
    replace_file(directory / "loss.png", _drawn(found))
    console = Console(highlight=False)
    console.print(_table(found))
    console.print(f"written to {directory}: report.json, loss.png, checkpoints", soft_wrap=True)


def _table(found: Mapping[str, Any]) -> Table:
    """The run at a glance."""
    settings, steps = found["settings"], found["steps"]
    rows = Table(title=f"{settings['engine']}, {settings['ranks']} ranks, {settings['preset']}")
    rows.add_column("what")
    rows.add_column("value", justify="right")
    losses = {"unigram entropy of the text": found["text"]["unigram_entropy"]}
    if found["held_out_loss"] is not None:
        losses = {"held-out loss": found["held_out_loss"], **losses}
    if steps:
        first, last = (steps[index]["loss"] for index in (0, -1))
        losses = {"training loss, first step": first, "training loss, last step": last, **losses}
    rows.add_row("steps", f"{steps[-1]['step'] if steps else 0:,}")
    for name, loss in losses.items():
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
    steps, settings, text = found["steps"], found["settings"], found["text"]
    for rows, style, width, label in (
        (steps, "-", 1, "training batch"),
        (found["evaluations"], "o-", 1.5, "held-out text"),
    ):
        x, y = ([row[key] for row in rows] for key in ("step", "loss"))
        losses.plot(x, y, style, lw=width, label=label)
    label = "unigram entropy of the text"
    losses.axhline(text["unigram_entropy"], color="black", ls="--", lw=1, label=label)
    losses.set_ylabel("loss (nats per byte)")
    losses.set_title(
        f"{found['parameters'] / 1e6:.2f} M parameters on {text['name']}, {settings['engine']} "
        f"engine, {settings['ranks']} ranks, {'bf16' if settings['bf16'] else 'fp32'}"
    )
    losses.legend()
    losses.grid(alpha=0.3)
    speed = [row["tokens"] / row["seconds"] for row in steps]
    speeds.plot([row["step"] for row in steps], speed, lw=1, color="tab:green")
    speeds.set_ylim(bottom=0)
    speeds.set_ylabel("tokens per second")
    speeds.set_xlabel("optimizer step")
    speeds.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
