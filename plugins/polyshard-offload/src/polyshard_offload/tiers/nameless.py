"""Files below a directory that every user may write to, which no other user can reach.

[Note: shared places]
The default directory for swap files is shared: others may put links and directories of any name
there, at any moment. So a file is made without a name where the file system can do that
(``O_TMPFILE``); elsewhere in a fresh directory of our own under a name that cannot be guessed. It
is opened without following links, found to be ours and closed to others, and only then used,
through its descriptor. What a kill left behind is removed by the same rules: a directory of this
user that no other may write to, and in it only what swap files leave.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "polyshard-offload-"
_FILE = "swap"
_STAND_IN = ".nfs"  # what a network file system keeps of a file that is open and has lost its name
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_NAMELESS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


def open_nameless(path: Path) -> int:
    """A descriptor of a new file below ``path`` that has no name (mode 0600).

    Raises:
        OSError: when there can be none, or another user interferes.
    """
    remove_abandoned(path)
    parent = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags = os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC  # here: never to be linked
        return os.open(".", flags, 0o600, dir_fd=parent)
    except OSError as error:
        if error.errno not in _NO_NAMELESS_FILES:
            raise
        return _open_in_folder(parent)
    finally:
        os.close(parent)


def _open_in_folder(parent: int) -> int:
    """The same where a file needs a name while it is made."""
    name = f"{PREFIX}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"
    os.mkdir(name, 0o700, dir_fd=parent)
    with _own_folder(name, parent) as folder:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(_FILE, flags, 0o600, dir_fd=folder)
            os.unlink(_FILE, dir_fd=folder)
        finally:
            with suppress(OSError):  # network file systems keep a stand-in until the file is closed
                os.rmdir(name, dir_fd=parent)
    return descriptor


@contextmanager
def _own_folder(name: str, parent: int) -> Iterator[int]:
    """A descriptor of a directory of this user that no other may write to.

    Raises:
        OSError: when ``name`` is anything else.
    """
    folder = os.open(name, _FOLDER, dir_fd=parent)
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise OSError(errno.EPERM, f"'{name}' is not a private directory of this user")
        yield folder
    finally:
        os.close(folder)


def remove_abandoned(path: Path) -> None:
    """Remove what processes of this user and host left below ``path`` when they were killed."""
    beginning = f"{PREFIX}{socket.gethostname()}-"
    with suppress(OSError):
        parent = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in os.listdir(parent):
                pid = name.removeprefix(beginning).partition("-")[0]
                if name.startswith(beginning) and pid.isdigit() and not _is_alive(int(pid)):
                    _remove(name, parent)
        finally:
            os.close(parent)


def _remove(name: str, parent: int) -> None:
    with suppress(OSError):  # not ours, not empty, or gone by now
        with _own_folder(name, parent) as folder:
            for file in os.listdir(folder):
                if file == _FILE or file.startswith(_STAND_IN):
                    os.unlink(file, dir_fd=folder)
        os.rmdir(name, dir_fd=parent)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
