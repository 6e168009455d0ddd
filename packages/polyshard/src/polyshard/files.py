"""Files that are there whole or not at all, in directories that others may write to as well."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

READABLE = 0o644


def replace_file(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path``; whatever fails, what was there before stays.

    It is written to a new file beside ``path`` under a name nobody can guess, which is never an
    existing file or a link, and then renamed: a link at ``path`` is replaced, not followed.

    Raises:
        OSError: when it cannot be written.
    """
    descriptor, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(descriptor, READABLE)
            os.fsync(descriptor)
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the new name outlive a crash of the machine, where the file system can say so."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
