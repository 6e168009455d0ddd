"""``polyshard train``: every setting as an option, grouped for ``--help``."""

import os
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from polyshard_demo.errors import DemoError, RankError
from polyshard_demo.launch import launch
from polyshard_demo.offload import make_offload
from polyshard_demo.settings import DeviceName, EngineName, PresetName, Settings

__all__ = ["train"]

USAGE_EXIT = 2
FAILURE_EXIT = 1

DATA, MODEL = "Text and batches", "Model and engine"
TRAINING, OUTPUT = "Training", "Output and resuming"


def train(  # noqa: PLR0913 (typer: an option is a parameter)
    *,
    text: Annotated[
        Path | None,
        typer.Option(
            help="A text file, or a directory of *.txt, *.md, *.rst. "
            "Default: the documentation that ships with Python.",
            rich_help_panel=DATA,
        ),
    ] = Settings.text,
    batch: Annotated[
        int, typer.Option(help="Sequences per step over all ranks.", rich_help_panel=DATA)
    ] = Settings.batch,
    sequence: Annotated[
        int, typer.Option(help="Bytes per sequence.", rich_help_panel=DATA)
    ] = Settings.sequence,
    accumulate: Annotated[
        int,
        typer.Option(help="Micro-batches each rank splits its share into.", rich_help_panel=DATA),
    ] = Settings.accumulate,
    preset: Annotated[
        PresetName, typer.Option(help="Size of the model.", rich_help_panel=MODEL)
    ] = Settings.preset,
    tied: Annotated[
        bool, typer.Option("--tied", help="Share embedding and head.", rich_help_panel=MODEL)
    ] = Settings.tied,
    engine: Annotated[
        EngineName, typer.Option(help="Library that shards the model.", rich_help_panel=MODEL)
    ] = Settings.engine,
    plugins: Annotated[
        str, typer.Option(help="polyshard plugins: name[,name...].", rich_help_panel=MODEL)
    ] = "",
    quantize: Annotated[
        str,
        typer.Option(
            help="Quantize communication with polyshard-quantized: one of its formats, such as "
            "int8, or PARAMETERS,GRADIENTS, each a format or native.",
            rich_help_panel=MODEL,
        ),
    ] = Settings.quantize,
    offload: Annotated[
        str,
        typer.Option(
            help="What rests away from the device: optimizer=disk,params=host; tiers are device, "
            "host and disk. Also fraction=0.5 and path=DIRECTORY.",
            rich_help_panel=MODEL,
        ),
    ] = Settings.offload,
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Local processes; ignored under torchrun. Default: 2, or 1 for engine single.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    tp: Annotated[
        int,
        typer.Option(
            help="Ranks that share each layer, with polyshard-tensor-parallel.",
            rich_help_panel=MODEL,
        ),
    ] = Settings.tp,
    device: Annotated[
        DeviceName, typer.Option(help="Where to compute.", rich_help_panel=MODEL)
    ] = Settings.device,
    bf16: Annotated[
        bool,
        typer.Option(
            "--bf16", help="Gather and compute in bf16, reduce in fp32.", rich_help_panel=MODEL
        ),
    ] = Settings.bf16,
    steps: Annotated[
        int, typer.Option(help="Optimizer steps.", rich_help_panel=TRAINING)
    ] = Settings.steps,
    lr: Annotated[
        float, typer.Option(help="Peak learning rate.", rich_help_panel=TRAINING)
    ] = Settings.lr,
    seed: Annotated[
        int, typer.Option(help="Decides initial weights and batches.", rich_help_panel=TRAINING)
    ] = Settings.seed,
    eval_every: Annotated[
        int,
        typer.Option(
            help="Steps between evaluations; 0: only at the end.", rich_help_panel=TRAINING
        ),
    ] = Settings.eval_every,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run directory. Default: runs/DATE-TIME, or the run that is resumed.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    checkpoint_every: Annotated[
        int,
        typer.Option(help="Steps between checkpoints; 0: only the last.", rich_help_panel=OUTPUT),
    ] = Settings.checkpoint_every,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Run directory, or one of its checkpoints, to go on from; "
            "also with other ranks or another engine.",
            rich_help_panel=OUTPUT,
        ),
    ] = Settings.resume,
) -> None:
    """Train a byte-level language model on real text, sharded over several processes.

    Writes checkpoints, report.json and loss.png to the run directory.
    """
    try:
        settings = Settings(
            out=out or _default_out(resume),
            text=text,
            engine=engine,
            plugins=tuple(name.strip() for name in plugins.split(",") if name.strip()),
            quantize=quantize,
            offload=offload,
            ranks=_ranks(ranks, engine),
            tp=tp,
            preset=preset,
            tied=tied,
            steps=steps,
            batch=batch,
            sequence=sequence,
            accumulate=accumulate,
            lr=lr,
            seed=seed,
            bf16=bf16,
            device=device,
            resume=resume,
            checkpoint_every=checkpoint_every,
            eval_every=eval_every,
        )
        make_offload(offload)  # so that a mistake is told before any rank starts
        launch(settings)
    except DemoError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(USAGE_EXIT) from None
    except RankError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(FAILURE_EXIT) from None


def _ranks(given: int | None, engine: EngineName) -> int:
    """The number of ranks: torchrun's, the one asked for, or what the engine is best shown with."""
    if "RANK" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if given is not None:
        return given
    return 1 if engine == "single" else Settings.ranks


def _default_out(resume: Path | None) -> Path:
    """A new run directory, or the one a resume goes on in."""
    if resume is None:
        return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}"
    is_checkpoint = resume.parent.name == "checkpoints"
    return resume.parent.parent if is_checkpoint else resume
