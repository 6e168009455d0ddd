"""Streams of a device, and lanes: streams that transfers of one kind share.

[Note: lanes]
On an accelerator transfers run beside the computation, on lanes. Three rules keep them in order:

* A lane goes behind the current stream when it is given work: what it reads was written there, and
  the memory it writes was given back there.
* Whoever needs the result has the current stream go behind the *end* of that work, an event.
* Memory that a lane uses is taken on the current stream, never on the lane: a lane owns no memory
  that other streams could not use again. So it must not go back before the current stream is behind
  the end. :class:`Passage` holds it until then; should nobody wait, because a model was dropped or
  a step failed, the stream the work was started from goes behind the end first. The host is not
  held up by any of this, and ``record_stream`` is never used: memory is deterministic.

Host memory follows no stream. What copies from and to it keeps it until the device is through with
it, and has the host wait before it may write what is read or read what is written.

Lanes are shared by all groups below a root (or several roots, see ``share_comm_ctx``). Gathers and
reductions have priority over the computation, whose kernels could hold them up; sums over replicas
run beside both, on a lane without.

Devices whose work has ended when it was launched (the CPU) have no streams: ``streams_of`` is
``None`` there, and lanes do nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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


class Passage:
    """Work given to a lane, and the memory it uses. See [Note: lanes].

    It holds that memory as long as it is held itself: whoever waited lets go of it.
    """

    def __init__(self, streams: Streams, end: Event, keep: object) -> None:
        self._streams = streams
        self._end = end
        self._keep = keep
        # A model may be dropped in the middle of a transfer, and its memory go to other tensors.
        self._dropped = weakref.finalize(self, _go_behind, streams.current(), end)
        self._dropped.atexit = False

    def wait(self) -> None:
        """Have the current stream go behind the work."""
        self._streams.current().wait_event(self._end)
        self._dropped.detach()


def _go_behind(stream: Any, end: Event) -> None:
    """What the passage keeps ends after this."""
    stream.wait_event(end)


class Arrived:
    """Work that has ended already."""

    def wait(self) -> None:
        """Nothing to do."""


ARRIVED = Arrived()


class Lane:
    """A stream for transfers of one kind. See [Note: lanes]."""

    def __init__(self, streams: Streams | None, priority: int) -> None:
        """A new stream; nothing at all without ``streams``."""
        self._streams = streams
        self.stream: Any = None if streams is None else streams.new(priority)

    def enter(self) -> AbstractContextManager[Any]:
        """Run the block on the lane, behind all that the current stream was given so far."""
        if self._streams is None:
            return nullcontext()
        self.stream.wait_stream(self._streams.current())
        return self._streams.on(self.stream)

    def leave(self, keep: object) -> Passage | Arrived:
        """End what was given to the lane, which uses the memory ``keep``.

        Call it outside of the block: the stream that is current then is the one that waits.
        """
        if self._streams is None:
            return ARRIVED
        return Passage(self._streams, self._end(), keep)

    def _end(self) -> Event:
        assert self._streams is not None
        end = self._streams.new_event()
        end.record(self.stream)
        return end


PRIORITIES = {"gather": HIGH_PRIORITY, "reduce": HIGH_PRIORITY}
"""Of lanes by kind. Sums over replicas have none: other links carry them than what runs beside."""


class Lanes:
    """The lanes of one root: a kind of traffic has one on each device, made when first used."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, torch.device], Lane] = {}

    def lane(self, kind: str, device: torch.device, priority: int | None = None) -> Lane:
        """The lane for ``kind``, with ``priority`` if it is made now."""
        lane = self._made.get((kind, device))
        if lane is None:
            number = PRIORITIES.get(kind, NO_PRIORITY) if priority is None else priority
            lane = self._made[kind, device] = Lane(streams_of(device), number)
        return lane

    def stream_of(self, kind: str, streams: Streams) -> Any:
        """The stream of the lane for ``kind`` on the device of ``streams``."""
        return self.lane(kind, streams.device).stream
