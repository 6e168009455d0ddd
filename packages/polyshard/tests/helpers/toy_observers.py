"""An observer that remembers."""

from __future__ import annotations

from polyshard import Plugin, hookimpl
from polyshard.plugins.seams import Observer


class Watcher(Observer):
    """Writes down what it sees."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_unshard(self, group: str, payload_bytes: int) -> None:
        self.events.append(f"unshard {group} {payload_bytes}")

    def on_unsharded(self, group: str, wait_seconds: float) -> None:
        self.events.append(f"unsharded {group}")

    def on_reshard(self, group: str) -> None:
        self.events.append(f"reshard {group}")

    def on_reduce(self, group: str, payload_bytes: int) -> None:
        self.events.append(f"reduce {group} {payload_bytes}")

    def on_reduced(self, group: str, wait_seconds: float) -> None:
        self.events.append(f"reduced {group}")

    def on_step_end(self) -> None:
        self.events.append("step end")


class Watching(Plugin):
    """Contributes an observer."""

    name = "watching"

    def __init__(self) -> None:
        self.watcher = Watcher()

    @hookimpl
    def polyshard_observer(self) -> Watcher:
        return self.watcher
