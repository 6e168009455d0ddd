"""Writing with ``torch.distributed.checkpoint`` while adding up what is written."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from typing_extensions import override

from polyshard_checkpoint.manifest import FileSum


@dataclass(frozen=True)
class Progress:
    """How far this rank is with a save, in bytes. The total leaves out torch's headers."""

    written: int
    total: int


class SummedWriter(FileSystemWriter):
    """A ``FileSystemWriter`` that knows the checksums of its files without reading them again."""

    def __init__(self, folder: Path, progress: Callable[[int], None]) -> None:
        """Write to ``folder``, which exists; ``progress`` gets the bytes of every write."""
        super().__init__(folder)
        self._files = _SummedFiles(progress)
        self.fs = self._files

    @property
    def sums(self) -> dict[str, FileSum]:
        """Of the files this rank has written, by name."""
        return dict(self._files.sums)


class _SummedFiles(FileSystem):
    def __init__(self, progress: Callable[[int], None]) -> None:
        self.sums: dict[str, FileSum] = {}
        self._progress = progress

    @override
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        # Never into a file of another program: the folder is new, and so are its files.
        with Path(path).open("xb" if mode == "wb" else mode) as file:
            stream = _Summed(file, self._progress)
            yield stream
        self.sums[Path(path).name] = stream.total

    @override
    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _Summed(io.IOBase):
    """Passes on what is written to a file from its start to its end, and adds it up."""

    def __init__(self, file: IO[bytes], progress: Callable[[int], None]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._progress = progress

    def write(self, content: Any) -> int:
        self._file.write(content)
        count = memoryview(content).nbytes
        self._hash.update(content)
        self._bytes += count
        self._progress(count)
        return count

    @override
    def tell(self) -> int:
        return self._bytes

    @override
    def fileno(self) -> int:
        """For ``os.fsync``, which torch calls with the metadata still in the buffer."""
        self._file.flush()
        return self._file.fileno()

    @override
    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    @override
    def close(self) -> None:
        self._file.close()

    @property
    def total(self) -> FileSum:
        return FileSum(self._bytes, self._hash.hexdigest())
