"""What verbs have in common: a user's mistakes as one message, and tables of one width in files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console

USAGE_EXIT = 2


@contextmanager
def told_in_one_message(*kinds: type[Exception], code: int = USAGE_EXIT) -> Iterator[None]:
    """Errors of ``kinds`` without a traceback; the command ends with ``code``."""
    try:
        yield
    except kinds as error:
        fail(str(error), code)


def fail(message: str, code: int = USAGE_EXIT) -> NoReturn:
    """Print ``message`` and end the command with ``code``."""
    typer.secho(f"error: {message}", fg="red", err=True)
    raise typer.Exit(code) from None


def console_for_tables(width: int) -> Console:
    """As wide as the terminal, or ``width`` characters where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=width)
