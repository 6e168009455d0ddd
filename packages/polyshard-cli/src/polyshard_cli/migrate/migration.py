"""From scripts to a document: every engine in turn, then imports, then the new text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from polyshard_cli.migrate.editing.apply import apply
from polyshard_cli.migrate.editing.draft import Draft
from polyshard_cli.migrate.errors import MigrateError
from polyshard_cli.migrate.families.ddp import migrate_ddp
from polyshard_cli.migrate.families.deepspeed import Beside, migrate_deepspeed
from polyshard_cli.migrate.families.fsdp1 import migrate_fsdp1
from polyshard_cli.migrate.families.moving import move_clipping, move_names
from polyshard_cli.migrate.families.uncertain import list_uncertain
from polyshard_cli.migrate.report.document import Document, MigratedFile
from polyshard_cli.migrate.source.files import gather, is_concerned, parse, read, write
from polyshard_cli.migrate.source.view import FileView

__all__ = ["migrate_files", "migrate_source", "write_files"]


def migrate_files(paths: Iterable[Path], configuration: Path | None = None) -> Document:
    """Migrate scripts, and those below folders; nothing is written.

    Args:
        paths: of files and folders.
        configuration: of DeepSpeed, for scripts whose command line names it.

    Raises:
        MigrateError: for what cannot be read or parsed.
    """
    files = []
    for path in gather(paths):
        beside = Beside(path.parent, configuration)
        files.append(migrate_source(path, read(path), beside))
    return Document(tuple(files))


def migrate_source(path: Path, content: bytes, beside: Beside) -> MigratedFile:
    """Migrate ``content``, which would be at ``path``.

    Raises:
        MigrateError: for what is not Python.
    """
    if not is_concerned(content):
        return MigratedFile(path, content, content, "utf-8", ())
    try:
        draft = Draft(FileView(parse(path, content)))
    except RecursionError as error:
        raise MigrateError(f"{path}: expressions are nested too deeply to be read") from error
    move_names(draft)
    shards = [
        any(use.known and use.known.name == "fully_shard" for use in draft.view.uses),
        migrate_fsdp1(draft),
        migrate_ddp(draft),
        migrate_deepspeed(draft, beside),
    ]
    if any(shards):
        move_clipping(draft)
    list_uncertain(draft)
    after = apply(draft)
    return MigratedFile(
        path, content, after, draft.view.module.encoding, tuple(sorted(draft.findings))
    )


def write_files(document: Document) -> Document:
    """Write what changed; the document as written, whose lines are those of the new text.

    Raises:
        MigrateError: when a file cannot be written; those before it were.
    """
    for file in document.files:
        if file.is_changed:
            write(file.path, file.after)
    return Document(tuple(map(_written, document.files)), is_written=True)


def _written(file: MigratedFile) -> MigratedFile:
    """``file`` with its findings where they are now: a line that went is where others took over."""
    if not file.is_changed:
        return file
    old, new = map(file.lines, (file.before, file.after))
    at: dict[int, int] = {}
    for _, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for place in range(i1, i2):
            at[place + 1] = min(j1 + place - i1, max(j2 - 1, j1)) + 1
    found = tuple(replace(f, line=min(at.get(f.line, f.line), len(new))) for f in file.findings)
    return replace(file, findings=found)
