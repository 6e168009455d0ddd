"""The ``polyshard`` command. Needs the extra: ``pip install 'polyshard[demo]'``."""

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

__all__ = ["app", "main"]

REQUIRED = ("typer", "rich")


def app() -> "typer.Typer":
    """The command with all its subcommands; each is defined in a module of its own."""
    import typer

    from polyshard import plugin_cli
    from polyshard.demo.command import train

    commands = typer.Typer(
        help="Composable fully-sharded training for PyTorch.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    commands.command("train")(train)
    commands.add_typer(plugin_cli.app(), name="plugins")
    commands.callback()(_keep_subcommands)
    return commands


def main() -> None:
    """Run the command; without the extra's packages, say in one line what to install."""
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if missing:
        sys.exit(f"polyshard: {', '.join(missing)} missing; pip install 'polyshard[demo]'")
    app()(prog_name="polyshard")


def _keep_subcommands() -> None:
    """Composable fully-sharded training for PyTorch."""
