"""``polyshard trace``: one file of all ranks' traces, and tables of what is in them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from polyshard_cli.output import console_for_tables, told_in_one_message
from polyshard_cli.trace.errors import TraceError
from polyshard_cli.trace.reading.merging import merge
from polyshard_cli.trace.reading.summary import summarize
from polyshard_cli.trace.reading.table import WIDTH, show_merged, show_summary

__all__ = ["app"]

ROWS = 40

app = typer.Typer(help="Timelines of ranks, after a run with Trace.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="Folder of Trace(folder).", metavar="FOLDER")]
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
    with told_in_one_message(TraceError):
        merged = merge(folder, out or folder / "trace.json")
    if as_json:
        plain = asdict(merged) | {"path": str(merged.path), "missing": merged.missing}
        typer.echo(json.dumps(plain, indent=1))
    else:
        show_merged(merged, console_for_tables(WIDTH))


@app.command()
def show(
    folder: Folder,
    rank: Annotated[int | None, typer.Option(help="Only this rank. Default: all.")] = None,
    rows: Annotated[int, typer.Option(help="Rows of units, at most.", min=0)] = ROWS,
    *,
    as_json: Json = False,
) -> None:
    """Add up time, waiting and bytes by unit and kind."""
    with told_in_one_message(TraceError):
        summary = summarize(folder, rank=rank)
    if as_json:
        typer.echo(json.dumps(summary.to_plain(), indent=1))
    else:
        show_summary(summary, console_for_tables(WIDTH), rows)
