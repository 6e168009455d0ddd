"""Which files are meant, what is in them, and writing them back whole."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import libcst as cst

from polyshard.files import replace_file
from polyshard_cli.migrate.errors import MigrateError

__all__ = ["gather", "is_concerned", "parse", "read", "write"]

# Folders that hold no scripts of the user's own.
_PASSED_OVER = {"__pycache__", "node_modules", "site-packages", "build", "dist"}
_CONCERNS = re.compile(rb"fsdp|fully_shard|FullySharded|DistributedDataParallel|deepspeed", re.I)


def gather(paths: Iterable[Path]) -> list[Path]:
    """Scripts as given, and those below folders; each once, in order.

    Raises:
        MigrateError: for what is not there, is not Python by its name, or holds no Python file.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            below = list(_below(path))
            if not below:
                raise MigrateError(f"{path}: no .py file in this folder or below it")
            found.update(dict.fromkeys(below))
        elif not path.exists():
            raise MigrateError(f"{path}: there is no such file or folder")
        elif path.suffix == ".ipynb":
            raise MigrateError(
                f"{path}: a notebook; write it as a script first: jupyter nbconvert --to script"
            )
        elif path.suffix not in {".py", ".pyi"}:
            raise MigrateError(f"{path}: not a Python file by its name; give it the suffix .py")
        else:
            found[path] = None
    return list(found)


def _below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts[:-1]
        if path.is_file() and not any(p.startswith(".") or p in _PASSED_OVER for p in parts):
            yield path


def read(path: Path) -> bytes:
    """What is in ``path``.

    Raises:
        MigrateError: when it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise MigrateError(f"{path}: cannot be read: {error.strerror}") from error


def is_concerned(content: bytes) -> bool:
    """Whether a file has a word of any engine: what has none is not even parsed."""
    return _CONCERNS.search(content) is not None


def parse(path: Path, content: bytes) -> cst.Module:
    """``content`` as a tree that keeps every character.

    Raises:
        MigrateError: for what is not Python, with the line.
    """
    if b"\0" in content:
        raise MigrateError(f"{path}: binary, not Python source")
    try:
        return cst.parse_module(content)
    except cst.ParserSyntaxError as error:
        place = f"{path}:{error.raw_line}"
        raise MigrateError(f"{place}: Python cannot parse it; fix its syntax first") from error
    except (UnicodeDecodeError, SyntaxError, LookupError) as error:  # an encoding it cannot be in
        raise MigrateError(f"{path}: not text in the encoding that it declares: {error}") from error


def write(path: Path, content: bytes) -> None:
    """Replace ``path``, or what it links to, whole; its mode stays.

    Raises:
        MigrateError: when it cannot be written; what was there before stays.
    """
    target = path.resolve()
    try:
        replace_file(target, content, stat.S_IMODE(target.stat().st_mode))
    except OSError as error:
        raise MigrateError(f"{path}: cannot be written: {error.strerror}") from error
