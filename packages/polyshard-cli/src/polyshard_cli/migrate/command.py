"""``polyshard migrate``: paths to a document, that to a diff or JSON, errors to one message."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyshard_cli.migrate.errors import MigrateError
from polyshard_cli.migrate.migration import migrate_files, write_files
from polyshard_cli.migrate.report.table import WIDTH, show
from polyshard_cli.output import console_for_tables, told_in_one_message

__all__ = ["migrate"]

LEFT_EXIT = 1

Scripts = Annotated[list[Path], typer.Argument(help="Python scripts, or folders of them.")]
Write = Annotated[bool, typer.Option("--write", help="Change the scripts.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Configuration = Annotated[
    Path | None,
    typer.Option(
        "--deepspeed-config", help="JSON file that the command line of the scripts names."
    ),
]


def migrate(
    scripts: Scripts,
    *,
    write: Write = False,
    as_json: Json = False,
    deepspeed_config: Configuration = None,
) -> None:
    """Rewrite scripts that use FSDP2, FSDP1, DDP or DeepSpeed for polyshard.

    Prints a diff, what will differ, and what is left to do by hand; --write changes the scripts.
    Exit code 0: nothing is left. 1: something needs a hand. 2: a file could not be read.
    """
    with told_in_one_message(MigrateError):
        document = migrate_files(scripts, deepspeed_config)
        if write:
            document = write_files(document)
    if as_json:
        typer.echo(document.to_json())
    else:
        show(document, console_for_tables(WIDTH))
    if document.left:
        raise typer.Exit(LEFT_EXIT)
