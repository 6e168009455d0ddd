"""``polyshard trace``: one file of all ranks' traces, and tables of what is in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polyshard_trace.errors import TraceError
from polyshard_trace.reading.merging import merge
from polyshard_trace.reading.summary import summarize
from polyshard_trace.reading.table import WIDTH, show_merged, show_summary

__all__ = ["app"]

USAGE_EXIT = 2
ROWS = 40

app = typer.Typer(help="What ranks did and when, after a run with Trace.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="What Trace(folder) wrote.", metavar="FOLDER")]
Json = Annotated[bool, typer.Option("--json", help="For programs: one JSON object.")]


@app.command("merge")
def merge_ranks(
    folder: Folder,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file. Default: FOLDER/trace.json.")
    ] = None,
    *,
    as_json: Json = False,
) -> None:
    """Make one file for Perfetto, a process per rank, in rank 0's clock."""
    with _told_in_one_message():
        merged = merge(folder, out or folder / "trace.json")
    if as_json:
        plain = asdict(merged) | {"path": str(merged.path), "missing": merged.missing}
        typer.echo(json.dumps(plain, indent=1))
    else:
        show_merged(merged, _console())


@app.command()
def show(
    folder: Folder,
    rank: Annotated[int | None, typer.Option(help="Only this rank. Default: all.")] = None,
    rows: Annotated[int, typer.Option(help="Rows of units, at most.", min=0)] = ROWS,
    *,
    as_json: Json = False,
) -> None:
    """Add up time, waiting and bytes by unit and kind."""
    with _told_in_one_message():
        summary = summarize(folder, rank=rank)
    if as_json:
        typer.echo(json.dumps(summary.to_plain(), indent=1))
    else:
        show_summary(summary, _console(), rows)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


@contextmanager
def _told_in_one_message() -> Iterator[None]:
    try:
        yield
    except TraceError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(USAGE_EXIT) from None
