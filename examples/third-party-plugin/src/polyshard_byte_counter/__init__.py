"""A polyshard plugin that adds up the bytes that each parameter group sends."""

import collections

from polyshard import ObserverPlugin


class ByteCounter(ObserverPlugin):
    """Called by the engine during the step; changes nothing."""

    name = "byte_counter"
    version = "0.1.0"

    def __init__(self) -> None:
        self.sent_bytes: collections.Counter[str] = collections.Counter()

    def on_unshard(self, group: str, payload_bytes: int) -> None:
        self.sent_bytes[group] += payload_bytes

    def on_reduce(self, group: str, payload_bytes: int) -> None:
        self.sent_bytes[group] += payload_bytes
