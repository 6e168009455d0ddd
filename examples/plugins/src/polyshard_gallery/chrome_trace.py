"""Write every transfer and every wait to a file for chrome://tracing or ui.perfetto.dev."""

import json
import os
import time
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from polyshard import ObserverPlugin


class ChromeTrace(ObserverPlugin):
    """Writes ``rank0.json``, ``rank1.json``, ... to ``folder``; whole after every step."""

    name = "chrome_trace"

    def __init__(self, folder: str | os.PathLike[str] = "traces") -> None:
        # No field of a dataclass: fields are compared across ranks, and folders may differ.
        self._folder = Path(folder)
        self._file: TextIO | None = None
        self._events: list[str] = []
        self._lines: dict[str, int] = {}
        self._started: dict[tuple[str, str], float] = {}

    def on_unshard(self, group: str, payload_bytes: int) -> None:
        self._begin("all-gather", group, payload_bytes)

    def on_unsharded(self, group: str, wait_seconds: float) -> None:
        self._end("all-gather", group, wait_seconds)

    def on_reduce(self, group: str, payload_bytes: int) -> None:
        self._begin("reduce", group, payload_bytes)

    def on_reduced(self, group: str, wait_seconds: float) -> None:
        self._end("reduce", group, wait_seconds)

    def on_step_end(self) -> None:
        self._add("step end", "(steps)", "i", time.perf_counter(), s="p")
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = (self._folder / f"rank{_rank()}.json").open("w", encoding="ascii")
            self._file.write("[\n")
        else:
            self._file.seek(self._file.tell() - len("\n]\n"))  # continue where the list was closed
            self._file.write(",\n")
        self._file.write(",\n".join(self._events) + "\n]\n")
        self._file.flush()
        self._events.clear()

    def _begin(self, what: str, group: str, payload_bytes: int) -> None:
        self._started[what, group] = time.perf_counter()
        self._add(what, group, "b", time.perf_counter(), args={"bytes": payload_bytes})

    def _end(self, what: str, group: str, wait_seconds: float) -> None:
        now = time.perf_counter()
        self._add(what, group, "e", now)
        self._add(f"wait for {what}", group, "X", now - wait_seconds, dur=1e6 * wait_seconds)

    def _add(self, name: str, group: str, phase: str, seconds: float, **more: object) -> None:
        line = self._lines.setdefault(group, len(self._lines))
        event = {"name": name, "cat": "polyshard", "ph": phase, "ts": 1e6 * seconds, **more}
        event |= {"pid": _rank(), "tid": line, "id": f"{name} {group}"}
        self._events.append(json.dumps(event))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
