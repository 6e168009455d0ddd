"""A polyshard plugin that counts the bytes each parameter group sends."""

from collections import Counter

from polyshard import Observer, Plugin, hookimpl


class ByteObserver(Observer):
    """Called by the engine during the step; ``sent_bytes`` is a total for each group."""

    def __init__(self) -> None:
        self.sent_bytes: Counter[str] = Counter()

    def on_unshard(self, group: str, payload_bytes: int) -> None:
        self.sent_bytes[group] += payload_bytes

    def on_reduce(self, group: str, payload_bytes: int) -> None:
        self.sent_bytes[group] += payload_bytes


class ByteCounter(Plugin):
    """Counts bytes; changes nothing."""

    name = "byte_counter"
    version = "0.1.0"

    def __init__(self) -> None:
        self.observer = ByteObserver()

    @hookimpl
    def polyshard_observer(self) -> ByteObserver:
        """Watch every group with one observer."""
        return self.observer
