"""One file: every engine in turn, then imports, then the new text."""

from __future__ import annotations

from pathlib import Path

from polyshard_migrate.editing.apply import apply
from polyshard_migrate.editing.draft import Draft
from polyshard_migrate.families.ddp import migrate_ddp
from polyshard_migrate.families.fsdp1 import migrate_fsdp1
from polyshard_migrate.families.moving import move_clipping, move_names
from polyshard_migrate.families.uncertain import list_uncertain
from polyshard_migrate.source.files import parse
from polyshard_migrate.source.view import FileView


def migrate_file(path, content):
    draft = Draft(FileView(parse(path, content)))
    move_names(draft)
    done = migrate_fsdp1(draft)
    done |= migrate_ddp(draft)
    if done or any(u.known and u.known.name == "fully_shard" for u in draft.view.uses):
        move_clipping(draft)
    list_uncertain(draft)
    return apply(draft), draft
