"""Hold transfers back as a slower link would: how long are steps on that network?"""

import time
from dataclasses import dataclass, field

from polyshard import BackendPlugin
from polyshard.transport import Pending


@dataclass(frozen=True)
class Held(Pending):
    """A transfer that is not over before its time."""

    inner: Pending
    until: float

    def wait(self) -> None:
        self.inner.wait()
        time.sleep(max(0.0, self.until - time.perf_counter()))


@dataclass
class Link:
    """One rank's way out, which all groups share as they share one network card."""

    free_at: float = 0.0


@dataclass(frozen=True, eq=False)
class ThrottledLink(BackendPlugin):
    """Transfers follow each other at a rate, and arrive a latency later."""

    name = "throttled_link"
    bytes_per_second: float = 125e6
    latency_seconds: float = 100e-6
    link: Link = field(default_factory=Link, init=False, repr=False)

    def started(self, pending: Pending, sent_bytes: int) -> Pending:
        begin = max(self.link.free_at, time.perf_counter())
        self.link.free_at = begin + sent_bytes / self.bytes_per_second
        return Held(pending, self.link.free_at + self.latency_seconds)
