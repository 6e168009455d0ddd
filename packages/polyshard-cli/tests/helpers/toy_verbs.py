"""Verbs that entry points name."""

from __future__ import annotations

import typer


def greet(name: str = "you") -> None:
    """Say hello."""
    typer.echo(f"hello {name}")


several = typer.Typer(help="More than one.")


@several.command("one")
def first() -> None:
    """The first."""
    typer.echo("one of several")


@several.command("two")
def second() -> None:
    """The second."""


NOT_A_VERB = 3
