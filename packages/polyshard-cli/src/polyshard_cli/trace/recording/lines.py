"""The file of one rank: valid JSON after every write, whatever happens next."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from polyshard_cli.trace.errors import TraceError

__all__ = ["LineFile", "path_of"]

_END = b"\n]}\n"


def path_of(folder: Path, rank: int) -> Path:
    """Where ``rank`` writes."""
    return folder / f"rank{rank}.json"


class LineFile:
    """A JSON object whose ``traceEvents`` are lines that can be added to.

    Every write goes over the end of the list, and brings an end of its own.
    """

    def __init__(self, path: Path, head: Mapping[str, object], lines: Iterable[str]) -> None:
        """Make the file anew, with ``head`` as ``otherData`` and at least one line.

        Raises:
            TraceError: where it cannot be written.
        """
        self.path = path
        text = json.dumps({"displayTimeUnit": "ms", "otherData": head})
        start = f'{text[:-1]}, "traceEvents":[\n' + ",\n".join(lines)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A link there would have us write elsewhere.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
            self._handle = os.open(path, flags, 0o666)
        except OSError as error:
            raise self._failure(error, "give Trace a folder that this rank can write") from error
        self._close = weakref.finalize(self, os.close, self._handle)  # also if it is dropped
        self._size = 0
        self._write(start.encode("ascii"))

    def add(self, lines: Iterable[str]) -> None:
        """Write lines.

        Raises:
            TraceError: where that fails, for want of space say; the file is as it was before.
        """
        text = "".join(f",\n{line}" for line in lines)
        if text:
            self._write(text.encode("ascii"))

    def close(self) -> None:
        """Nothing more comes."""
        self._close()

    def _write(self, text: bytes) -> None:
        data = memoryview(text + _END)
        try:
            os.lseek(self._handle, self._size, os.SEEK_SET)
            while data:
                data = data[os.write(self._handle, data) :]
        except OSError as error:
            self._take_back()
            hint = "free space there, trace fewer steps (steps=range(...)), or give another folder"
            raise self._failure(error, hint) from error
        self._size += len(text)

    def _take_back(self) -> None:
        """End the list where it ended before; it has been that long, so this needs no space."""
        if not self._size:
            return
        with suppress(OSError):  # what is told is why the write failed
            os.ftruncate(self._handle, self._size + len(_END))
            os.pwrite(self._handle, _END, self._size)

    def _failure(self, error: OSError, hint: str) -> TraceError:
        reason = error.strerror or str(error)
        return TraceError(f"the trace {self.path} cannot be written: {reason}; {hint}.")
