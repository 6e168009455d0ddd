"""``polyshard bisect``: where two runs that should be equal are not, for the first time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from polyshard_cli.output import told_in_one_message
from polyshard_reproducible.comparing import Comparison, Difference, compare
from polyshard_reproducible.errors import RecordsError
from polyshard_reproducible.picture import draw
from polyshard_reproducible.records import PHASES

__all__ = ["bisect"]

DIFFERENT_EXIT = 1

First = Annotated[Path, typer.Argument(metavar="RUN_A", help="Folder that a Recorder wrote to.")]
Second = Annotated[Path, typer.Argument(metavar="RUN_B", help="Another one.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
Picture = Annotated[
    Path | None, typer.Option(help="Write a PNG: groups and steps, what differs, and where first.")
]


def bisect(first: First, second: Second, *, as_json: Json = False, picture: Picture = None) -> None:
    """Name the first step, phase and group in which two recorded runs differ.

    Exit code 0: equal; 1: they differ; 2: they cannot be compared.
    """
    with told_in_one_message(RecordsError, OSError):
        found = compare(first, second)
        if picture is not None:
            draw(found, picture)
    if as_json:
        typer.echo(json.dumps(found.to_plain(), indent=1))
    else:
        show(found, Console(highlight=False))
    raise typer.Exit(DIFFERENT_EXIT if found.differences else 0)


def show(found: Comparison, console: Console) -> None:
    """What was found, for a reader."""
    steps = f"steps {found.steps[0]} to {found.steps[-1]}"
    difference = found.first
    if difference is None:
        console.print(f"equal: {found.compared:,} digests of {steps}", soft_wrap=True)
    else:
        console.print(f"first difference: {difference}", soft_wrap=True, markup=False)
        console.print(table(found, difference))
    for note in found.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)


def table(found: Comparison, first: Difference) -> Table:
    """The step of the first difference: how much of what differs, by group."""
    rows = Table(title=f"how many differ in step {first.step}")
    rows.add_column("group")
    for phase in PHASES:
        rows.add_column(phase, justify="right")
    counts: dict[tuple[str, str], int] = {}
    for difference in found.at(first.step):
        cell = difference.key.group, difference.key.phase
        counts[cell] = counts.get(cell, 0) + 1
    for group in found.groups:
        cells = [str(counts.get((group, phase), "·")) for phase in PHASES]
        here = first.key.group == group
        if here:
            at = PHASES.index(first.key.phase)
            cells[at] = f"[bold red]first of {cells[at]}[/]"
        rows.add_row(escape(group), *cells)
    return rows
