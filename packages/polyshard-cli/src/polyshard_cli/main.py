"""The ``polyshard`` command."""

from __future__ import annotations

import typer

from polyshard_cli.verbs import Verbs

__all__ = ["app", "main"]


def app() -> typer.Typer:
    """The command with all its verbs: its own, and those of installed distributions."""
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
    """Run the command."""
    app()(prog_name="polyshard")


def _keep_subcommands() -> None:
    """Composable fully-sharded training for PyTorch."""
