"""Hold transfers back as a slower link would: how long are steps on that network?"""

import time
from dataclasses import dataclass, field

from polyshard import CollectivesBackend, Plugin, hookimpl
from polyshard.transport import (
    MeshRoles,
    Pending,
    Transport,
    WrappedTransport,
    choose_transport,
)


class Link:
    """One rank's way out: transfers follow each other at a rate, and arrive a latency later."""

    def __init__(self, bytes_per_second: float, latency_seconds: float) -> None:
        self._rate, self._latency, self._free_at = bytes_per_second, latency_seconds, 0.0

    def hold(self, pending: Pending, nbytes: int) -> Pending:
        """``pending``, not over before its bytes have left and arrived."""
        self._free_at = max(self._free_at, time.perf_counter()) + nbytes / self._rate
        return Held(pending, self._free_at + self._latency)


@dataclass(frozen=True)
class Held(Pending):
    """A transfer that is not over before its time."""

    inner: Pending
    until: float

    def wait(self) -> None:
        self.inner.wait()
        time.sleep(max(0.0, self.until - time.perf_counter()))


class HeldTransport(WrappedTransport):
    """Another transport at the speed of a link."""

    def __init__(self, inner: Transport, link: Link) -> None:
        super().__init__(inner)
        self.name, self._link = f"throttled {inner.name}", link

    def started(self, pending: Pending, sent_bytes: int) -> Pending:
        return self._link.hold(pending, sent_bytes)


@dataclass(frozen=True, eq=False)
class ThrottledLink(Plugin, CollectivesBackend):
    """All groups of a rank share one link, as they share one network card."""

    name = "throttled_link"
    bytes_per_second: float = 125e6
    latency_seconds: float = 100e-6
    _link: Link = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_link", Link(self.bytes_per_second, self.latency_seconds))

    @hookimpl
    def polyshard_collectives_backend(self) -> CollectivesBackend:
        """The plugin is its own factory."""
        return self

    def bind(self, group: GroupInfo, roles: MeshRoles) -> Transport:
        transport = choose_transport(roles, group.device)
        return HeldTransport(transport, self._link) if transport.size > 1 else transport
