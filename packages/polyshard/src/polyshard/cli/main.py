"""The ``polyshard`` command. Needs the extra: ``pip install 'polyshard[cli]'``."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

__all__ = ["app", "main"]

REQUIRED = ("typer", "rich")


def app() -> typer.Typer:
    """The command with all its verbs: core's own, and those of installed distributions."""
    import typer

    from polyshard.cli.verbs import Verbs

    commands = typer.Typer(
        cls=Verbs,
        help="Composable fully-sharded training for PyTorch.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    commands.callback()(_keep_subcommands)
    return commands


def main() -> None:
    """Run the command; without the extra's packages, say in one line what to install."""
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if missing:
        sys.exit(f"polyshard: {', '.join(missing)} missing; pip install 'polyshard[cli]'")
    app()(prog_name="polyshard")


def _keep_subcommands() -> None:
    """Composable fully-sharded training for PyTorch."""
