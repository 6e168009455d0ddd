"""Streams of a device, and lanes: streams that transfers of one kind share.

[Note: lanes]
On an accelerator transfers run beside the computation, on lanes. Three rules keep them in order:

* A lane goes behind the current stream when it is given work: what it reads was written there, and
  the memory it writes was given back there.
* What needs the result has the current stream go behind the *end* of that work, an event.
* Memory that a lane uses is taken on the current stream, never on the lane: a lane owns no memory
  that other streams could not use again. So it must not go back before the current stream is behind
  the end. The frame of a program holds it until then; should nothing wait, because a model was
  dropped or a step failed, the stream that started the work goes behind the end first. The host is
  not held up by any of this, and ``record_stream`` is never used: memory is deterministic.

Host memory follows no stream. What copies from and to it keeps it until the device is through with
it, and has the host wait before it may write what is read or read what is written.

Lanes are shared by all groups below a root (or several roots, see ``share_comm_ctx``). Gathers and
reductions have priority over the computation, whose kernels could hold them up; sums over replicas
run beside both, on a lane without.

Devices whose work has ended when it was launched (the CPU) have no streams: ``streams_of`` is
``None`` there, and there are no lanes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

HIGH_PRIORITY = -1
NO_PRIORITY = 0


class Event(Protocol):
    """A place in the work of a stream."""

    def record(self, stream: Any) -> None:
        """Mark the end of what ``stream`` was given so far."""
        ...

    def query(self) -> bool:
        """Whether the device is through with all of it; never waits."""
        ...

    def synchronize(self) -> None:
        """Have the host wait until it is."""
        ...


@dataclass(frozen=True)
class Streams:
    """Streams and events of one device, through its module in torch (``torch.cuda``, say)."""

    device: torch.device
    module: Any

    def current(self) -> Any:
        """The stream that work launched now goes to."""
        return self.module.current_stream(self.device)

    def new(self, priority: int) -> Any:
        """A stream; lower numbers go first."""
        return self.module.Stream(self.device, priority=priority)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Have the block's work go to ``stream``."""
        block: AbstractContextManager[Any] = self.module.stream(stream)
        return block

    def new_event(self) -> Event:
        """An event that is not recorded yet: waiting for it does nothing."""
        event: Event = self.module.Event()
        return event

    def mark(self) -> Event:
        """The end of what the current stream was given so far."""
        event = self.new_event()
        event.record(self.current())
        return event


def device_module(device: torch.device) -> Any | None:
    """What torch offers for streams on ``device``; ``None`` where work is never left under way."""
    if device.type in {"cpu", "meta"}:
        return None
    return torch.get_device_module(device)


@functools.cache
def streams_of(device: torch.device) -> Streams | None:
    """The streams of ``device``, if it has any; looked up once."""
    module = device_module(device)
    return None if module is None else Streams(device, module)


def launched(device: torch.device) -> Callable[[], None]:
    """Has the host, in any of its threads, wait for what was launched on ``device`` so far."""
    streams = streams_of(device)
    return _nothing if streams is None else streams.mark().synchronize


def _nothing() -> None:
    """Nothing is under way."""


PRIORITIES = {"gather": HIGH_PRIORITY, "reduce": HIGH_PRIORITY}
"""Of lanes by kind. Sums over replicas have none: other links carry them than what runs beside."""


class Lanes:
    """The lanes of one root: a kind of traffic has one on each device, made when first used."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, torch.device], Any] = {}

    def stream_of(self, kind: str, streams: Streams) -> Any:
        """The stream of the lane for ``kind`` on the device of ``streams``."""
        key = kind, streams.device
        if key not in self._made:
            self._made[key] = streams.new(PRIORITIES.get(kind, NO_PRIORITY))
        return self._made[key]
