"""The module of a device that only records: streams, events, the stream that is current."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from polyshard_testing.streams.clocks import Clock, Timeline

COMPUTE = "compute"
HOST = "host"


class RecordedStream:
    """A stream by its name."""

    def __init__(self, module: RecordedModule, name: str, priority: int = 0) -> None:
        self.name = name
        self.priority = priority
        self._module = module

    def wait_stream(self, other: RecordedStream) -> None:
        """Continue after all that ``other`` was given so far."""
        self._module.launched(other.name)
        self._module.timeline.learn(self.name, self._module.timeline.known(other.name))

    def wait_event(self, event: RecordedEvent) -> None:
        """Continue after ``event``; at once if it was never recorded, as on an accelerator."""
        if event.clock is not None:
            self._module.timeline.learn(self.name, event.clock)

    def synchronize(self) -> None:
        """Have the host continue after all that the stream was given so far."""
        self._module.host_waits(self.name)


class RecordedEvent:
    """A place in the work of a stream."""

    def __init__(self, module: RecordedModule) -> None:
        self.clock: Clock | None = None
        self._module = module

    def record(self, stream: RecordedStream | None = None) -> None:
        """Mark what ``stream`` was given so far."""
        name = self._module.current if stream is None else stream.name
        self._module.launched(name)
        self.clock = self._module.timeline.snapshot(name)

    def synchronize(self) -> None:
        """Have the host continue after it."""
        if self.clock is not None:
            self._module.timeline.learn(self._module.host, self.clock)

    def query(self) -> bool:
        """Whether the host knows already; it is told no more than it waited for."""
        known = self._module.timeline.known(self._module.host)
        return self.clock is None or all(known.get(a, 0) >= s for a, s in self.clock.items())


class RecordedModule:
    """Stands for ``torch.cuda``; all its devices are one."""

    def __init__(self, timeline: Timeline) -> None:
        """Nothing was launched yet."""
        self.timeline = timeline
        self.streams: list[RecordedStream] = []
        self._currents = [RecordedStream(self, COMPUTE)]
        self._hosts = [HOST]

    # As torch.cuda ----------------------------------------------------------------------------

    def Stream(self, device: object = None, *, priority: int = 0) -> RecordedStream:  # noqa: N802
        """A new stream."""
        del device
        made = RecordedStream(self, f"stream {len(self.streams) + 1}", priority)
        self.streams.append(made)
        return made

    def Event(self) -> RecordedEvent:  # noqa: N802
        """A new event."""
        return RecordedEvent(self)

    def current_stream(self, device: object = None) -> RecordedStream:
        """Where work goes."""
        del device
        return self._currents[-1]

    @contextmanager
    def stream(self, stream: RecordedStream) -> Iterator[None]:
        """Have the block's work go to ``stream``."""
        self._currents.append(stream)
        try:
            yield
        finally:
            self._currents.pop()

    # For the recorder -------------------------------------------------------------------------

    @property
    def current(self) -> str:
        """The name of the current stream."""
        return self._currents[-1].name

    @property
    def host(self) -> str:
        """The name of the thread that launches."""
        return self._hosts[-1]

    def launched(self, stream: str) -> None:
        """The host gives something to ``stream``: what it did before has ended by then."""
        self.timeline.learn(stream, self.timeline.known(self.host))

    def host_waits(self, stream: str) -> None:
        """The host continues after what ``stream`` was given so far."""
        self.launched(stream)
        self.timeline.learn(self.host, self.timeline.known(stream))

    @contextmanager
    def thread(self, name: str) -> Iterator[None]:
        """The block runs in another thread of the host, which starts now."""
        self.timeline.learn(name, self.timeline.known(self.host))
        self._hosts.append(name)
        self._currents.append(RecordedStream(self, f"default stream of {name}"))
        try:
            yield
        finally:
            self._currents.pop()
            self._hosts.pop()
