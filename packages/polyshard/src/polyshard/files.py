"""Files that are there whole or not at all, in directories that others may write to as well."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

READABLE = 0o644


@contextmanager
def replacing(path: Path, mode: int = READABLE) -> Iterator[BinaryIO]:
    """A new file that takes the place of ``path`` in the end; if anything fails, that stays.

    It is beside ``path`` under a name that cannot be guessed, which is never an existing file or a
    link, and then renamed: a link at ``path`` is replaced, not followed.

    Raises:
        OSError: when it cannot be written.
    """
    descriptor, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise
    sync_folder(path.parent)


def replace_file(path: Path, content: bytes, mode: int = READABLE) -> None:
    """Put ``content`` at ``path`` as :func:`replacing` does.

    Raises:
        OSError: when it cannot be written.
    """
    with replacing(path, mode) as file:
        file.write(content)


def sync_folder(folder: Path) -> None:
    """Have the new name outlive a crash of the machine, where the file system can say so."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
