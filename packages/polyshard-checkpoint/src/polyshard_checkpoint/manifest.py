"""The file that makes a folder a checkpoint: what belongs to it, and the checksum of each file.

It is written last and has a checksum of its own, so a folder that holds an intact one holds
everything that it lists, unless something damaged it later.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from polyshard.errors import CheckpointError
from polyshard.files import replace_file

NAME = "polyshard.json"
FORMAT = 1


@dataclass(frozen=True)
class FileSum:
    """A file's size in bytes and the SHA-256 of its content, in hexadecimal."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        step: the run's step it was saved at.
        order: grows with every checkpoint of the run, also where steps repeat.
        world_size: the number of ranks that saved it.
        torch: the version of torch.
        files: by name, without folders.
        missing: what it lacks, where ranks that were left saved what they had; one sentence each.
    """

    step: int
    order: int
    world_size: int
    torch: str
    files: Mapping[str, FileSum]
    missing: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Put it into ``folder``, whole or not at all.

        Raises:
            OSError: when it cannot be written.
        """
        content = {"format": FORMAT, **asdict(self), "files": dict(self._plain_files())}
        if not self.missing:
            del content["missing"]  # so that versions which know nothing of it read the others
        sealed = {"sha256": _sum(content), "checkpoint": content}
        replace_file(folder / NAME, json.dumps(sealed, indent=1).encode())

    def _plain_files(self) -> Mapping[str, dict[str, Any]]:
        return {name: asdict(found) for name, found in sorted(self.files.items())}

    @staticmethod
    def read(folder: Path) -> Manifest:
        """The manifest of the checkpoint in ``folder``.

        Raises:
            CheckpointError: when there is none, or it is damaged or of another format.
        """
        try:
            sealed = json.loads((folder / NAME).read_bytes())
            content = sealed["checkpoint"]
            if _sum(content) != sealed["sha256"]:
                raise ValueError("its own checksum does not fit")
            if content.pop("format") != FORMAT:
                raise ValueError(f"it is not of format {FORMAT}; load it with a newer polyshard")
            files = {name: FileSum(**found) for name, found in content.pop("files").items()}
            if any(not name or name == ".." or PurePath(name).name != name for name in files):
                raise ValueError("it names files of other folders")
            missing = tuple(content.pop("missing", ()))
            found = Manifest(files=files, missing=missing, **content)
            if not found.is_typed():
                raise TypeError("its fields have wrong types")
            return found
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"'{folder / NAME}' is no manifest of a checkpoint: {type(error).__name__}: {error}"
            ) from error

    def is_typed(self) -> bool:
        """Whether everything is of the type that is declared; JSON may hold anything."""
        numbers = [self.step, self.order, self.world_size, *(f.bytes for f in self.files.values())]
        texts = [self.torch, *self.missing, *(f.sha256 for f in self.files.values())]
        return all(type(n) is int and n >= 0 for n in numbers) and all(
            isinstance(text, str) for text in texts
        )

    def damage(self, folder: Path, part: int, parts: int) -> list[str]:
        """What is wrong with the files of ``folder``; of ``parts`` ranks, each reads its share.

        Every rank looks at all sizes.
        """
        found = []
        for index, (name, expected) in enumerate(sorted(self.files.items())):
            size = _size(folder / name)
            if size is None:
                found.append(f"{name} is missing or no plain file")
            elif size != expected.bytes:
                found.append(f"{name} has {size:,} bytes, was {expected.bytes:,}")
            elif index % parts == part:
                found += _changed(folder / name, expected)
        return found


def file_sum(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _changed(path: Path, expected: FileSum) -> list[str]:
    try:
        same = file_sum(path) == expected.sha256
    except OSError as error:  # a bad sector, say: nothing that peers may not be told of
        return [f"{path.name} cannot be read: {error.strerror or error}"]
    return [] if same else [f"the content of {path.name} has changed"]


def _size(path: Path) -> int | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _sum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
