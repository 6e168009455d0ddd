"""``polyshard compare``: options to settings, a comparison to a table, JSON and a picture."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

from polyshard.files import replace_file
from polyshard_cli.compare import comparing, options
from polyshard_cli.compare.errors import CompareError
from polyshard_cli.compare.report.document import Comparison
from polyshard_cli.compare.report.picture import check_picture, draw
from polyshard_cli.compare.report.table import WIDTH, show
from polyshard_cli.compare.settings import DEFAULT_ENGINES, Settings
from polyshard_cli.output import console_for_tables, told_in_one_message

__all__ = ["compare"]

FAILURE_EXIT = 1
ENGINES = ",".join(DEFAULT_ENGINES)
PRINTED = Path("-")


def compare(
    job: options.Job = Settings.job,
    *,
    engines: options.Engines = ENGINES,
    ranks: options.Ranks = Settings.ranks,
    units: options.Units = None,
    batch: options.Batch = Settings.batch,
    sequence: options.Sequence = Settings.sequence,
    steps: options.Steps = Settings.steps,
    warmup: options.Warmup = Settings.warmup,
    seed: options.Seed = Settings.seed,
    device: options.Device = Settings.device,
    timeout: options.Timeout = Settings.timeout,
    sequential: options.Sequential = Settings.sequential,
    json: options.Json = None,
    picture: options.Picture = None,
) -> None:
    """Train one job under several engines: time, memory, bytes and losses, side by side.

    Exit code 1: an engine failed, which the table says, and the others were measured. 2: nothing
    was measured, and one message says why.
    """
    with told_in_one_message(CompareError):
        settings = Settings(
            job=job,
            engines=tuple(name.strip() for name in engines.split(",") if name.strip()),
            ranks=ranks,
            units=tuple(units or ()),
            batch=batch,
            sequence=sequence,
            steps=steps,
            warmup=warmup,
            seed=seed,
            device=device,
            timeout=timeout,
            sequential=sequential,
        )
        _check_files(json, picture)
        with _progress() as tell:
            found = comparing.compare(settings, tell)
        _write(found, json, picture)
    if json == PRINTED:
        typer.echo(found.to_json())
    else:
        show(found, console_for_tables(WIDTH))
    if found.failed:
        raise typer.Exit(FAILURE_EXIT)


def _check_files(json: Path | None, picture: Path | None) -> None:
    """Before minutes are spent on what could not be written."""
    if picture is not None:
        check_picture(picture)
    for option, path in (("--json", json), ("--picture", picture)):
        if path is None or path == PRINTED:
            continue
        if not path.parent.is_dir():
            raise CompareError(f"{option} {path}: there is no folder {path.parent}; make it first")
        if path.is_dir():
            raise CompareError(f"{option} {path}: it is a folder; name a file")
        if not os.access(path.parent, os.W_OK):
            raise CompareError(f"{option} {path}: {path.parent} cannot be written to")


def _write(found: Comparison, json: Path | None, picture: Path | None) -> None:
    try:
        if json is not None and json != PRINTED:
            replace_file(json, f"{found.to_json()}\n".encode())
        if picture is not None and found.reference is not None:
            draw(found, picture)
    except OSError as error:
        raise CompareError(f"{error.filename}: cannot be written: {error.strerror}") from error


@contextmanager
def _progress() -> Iterator[comparing.Tell]:
    """A line on the terminal that says what is being done, and goes away."""
    console = Console(stderr=True)
    with console.status("starting") as status:
        yield status.update
