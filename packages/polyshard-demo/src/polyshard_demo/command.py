"""``polyshard train``: every setting as an option, grouped for ``--help``."""

import os
from datetime import datetime
from pathlib import Path

from polyshard.cli.output import told_in_one_message
from polyshard_demo import options
from polyshard_demo.errors import DemoError, RankError
from polyshard_demo.launch import launch
from polyshard_demo.offload import make_offload
from polyshard_demo.settings import EngineName, Settings

__all__ = ["train"]

FAILURE_EXIT = 1


def train(  # noqa: PLR0913 (typer: an option is a parameter)
    *,
    text: options.Text = Settings.text,
    batch: options.Batch = Settings.batch,
    sequence: options.Sequence = Settings.sequence,
    accumulate: options.Accumulate = Settings.accumulate,
    preset: options.Preset = Settings.preset,
    tied: options.Tied = Settings.tied,
    dropout: options.Dropout = Settings.dropout,
    engine: options.Engine = Settings.engine,
    plugins: options.Plugins = "",
    quantize: options.Quantize = Settings.quantize,
    offload: options.Offload = Settings.offload,
    ranks: options.Ranks = None,
    tp: options.Tp = Settings.tp,
    shard_ranks: options.ShardRanks = Settings.shard_ranks,
    device: options.Device = Settings.device,
    timeout: options.Timeout = Settings.timeout,
    bf16: options.Bf16 = Settings.bf16,
    steps: options.Steps = Settings.steps,
    lr: options.Lr = Settings.lr,
    seed: options.Seed = Settings.seed,
    guards: options.Guards = Settings.guards,
    reproducible: options.Reproducible = Settings.reproducible,
    eval_every: options.EvalEvery = Settings.eval_every,
    out: options.Out = None,
    checkpoint_every: options.CheckpointEvery = Settings.checkpoint_every,
    log_every: options.LogEvery = Settings.log_every,
    record: options.Record = Settings.record,
    trace: options.Trace = Settings.trace,
    page: options.Page = Settings.page,
    machine: options.Machine = Settings.machine,
    resume: options.Resume = Settings.resume,
) -> None:
    """Train a byte-level language model on real text, sharded over several processes.

    Writes checkpoints, report.json, loss.png and report.html to the run directory.
    """
    with told_in_one_message(DemoError), told_in_one_message(RankError, code=FAILURE_EXIT):
        auto = resume == Path("auto")
        resume = _output_of_auto(out) if auto else resume
        settings = Settings(
            out=out or _default_out(resume),
            text=text,
            engine=engine,
            plugins=tuple(name.strip() for name in plugins.split(",") if name.strip()),
            quantize=quantize,
            offload=offload,
            ranks=_ranks(ranks, engine),
            tp=tp,
            shard_ranks=shard_ranks,
            timeout=timeout,
            preset=preset,
            tied=tied,
            dropout=dropout,
            steps=steps,
            batch=batch,
            sequence=sequence,
            accumulate=accumulate,
            lr=lr,
            seed=seed,
            guards=guards,
            reproducible=reproducible,
            bf16=bf16,
            device=device,
            resume=resume,
            auto=auto,
            checkpoint_every=checkpoint_every,
            log_every=log_every,
            record=record,
            trace=trace,
            page=page,
            machine=machine,
            eval_every=eval_every,
        )
        make_offload(offload)  # so that a mistake is told before any rank starts
        launch(settings)


def _ranks(given: int | None, engine: EngineName) -> int:
    """The number of ranks: torchrun's, the one asked for, or what the engine is best shown with."""
    if "RANK" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if given is not None:
        return given
    return 1 if engine == "single" else Settings.ranks


def _output_of_auto(out: Path | None) -> Path:
    if out is None:
        raise DemoError("--resume auto goes on in a directory of its own: give it as --out")
    return out


def _default_out(resume: Path | None) -> Path:
    """A new run directory, or the one a resume goes on in."""
    if resume is None:
        return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}"
    is_checkpoint = resume.parent.name == "checkpoints"
    return resume.parent.parent if is_checkpoint else resume
