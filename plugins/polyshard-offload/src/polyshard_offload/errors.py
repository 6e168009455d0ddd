"""What offloading can raise, and the texts."""

from __future__ import annotations

import os
from pathlib import Path

from polyshard.errors import PolyshardError, SettingError

__all__ = ["CorruptedError", "OffloadError", "SettingError", "StorageError", "storage_error"]


class OffloadError(PolyshardError, RuntimeError):
    """Something was asked of offloaded state that it cannot do."""


class StorageError(PolyshardError, OSError):
    """The disk or file system failed; ``errno`` says how."""


class CorruptedError(StorageError):
    """What was read is not what was written."""


def storage_error(error: OSError, doing: str, path: Path, rank: int) -> StorageError:
    """``error`` with who, what, where, and what may help."""
    number = error.errno or 0
    hint = _HINTS.get(number, "Look at the file system's and the kernel's log.")
    text = error.strerror or str(error)
    found = StorageError(f"rank {rank}: {doing} below {path} failed: {text}. {hint}")
    found.errno = number
    return found


_HINTS = {
    28: "Free some space, or give DiskSettings(path=...) another file system.",
    13: "Give DiskSettings(path=...) a directory that this user can write to.",
    30: "Give DiskSettings(path=...) a directory that can be written to.",
    2: "Create the directory first, or give DiskSettings(path=...) one that exists.",
    5: "The device is unreliable: resume from the last checkpoint on another one.",
    22: "Try DiskSettings(direct=False).",
}
assert os.strerror(28)  # numbers are those of Linux, the only system with this plugin's calls
