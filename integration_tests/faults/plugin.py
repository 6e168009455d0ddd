"""A plugin that fails on demand, in whatever part it is told to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toy_codecs import BytesGather

from polyshard import Around, GatherCodec, Observer, Plugin, hookimpl
from polyshard.plugins.seams import GroupInfo, StorageFactory

PLACE = "blocks.1"
"""Groups of this unit fail, where they know the name of theirs yet; else the first does."""


class Strike:
    """When and how this rank fails; harmless until :meth:`arm`."""

    def __init__(self, fault: str, error: Callable[[], BaseException], mark: Path) -> None:
        """The moment of the fault is written to ``mark``."""
        self.fault = fault
        self._error = error
        self._mark = mark
        self._is_armed = False

    def arm(self) -> None:
        """Fail at the next opportunity."""
        self._is_armed = True

    def disarm(self) -> None:
        """Never again."""
        self._is_armed = False

    def mark(self) -> None:
        """It happens now."""
        self._mark.write_text(str(time.monotonic()))

    def at(self, place: str) -> None:
        """This is ``place``, where it may happen."""
        if self._is_armed and place == self.fault:
            self._is_armed = False
            self.mark()
            raise self._error()

    def around(self, place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which fails first."""

        def call(*args: Any, **keywords: Any) -> Any:
            self.at(place)
            return function(*args, **keywords)

        return call


class _Watcher(Observer):
    def __init__(self, strike: Strike) -> None:
        self._strike = strike

    def on_unsharded(self, group: str, wait_seconds: float) -> None:
        if group.startswith(PLACE):
            self._strike.at("observer")


@dataclass(frozen=True)
class _Codec(GatherCodec):
    """The codec of a stack (or one that ships raw bytes) that may fail."""

    strike: Strike
    inner: Any = None

    @property
    def name(self) -> str:
        return "bytes" if self.inner is None else str(self.inner.name)

    @property
    def settings(self) -> Any:
        return "" if self.inner is None else self.inner.settings

    def bind(self, group: GroupInfo, layout: Any) -> Any:
        self.strike.at("bind")
        bound: Any = BytesGather(layout) if self.inner is None else self.inner.bind(group, layout)
        if bound is not None and str(group.identity).startswith(PLACE):
            bound.encode = self.strike.around("encode", bound.encode)
            bound.decode = self.strike.around("decode", bound.decode)
        return bound


@dataclass(frozen=True)
class _Storage(StorageFactory):
    """The storage of a stack, or the engine's, that may fail."""

    strike: Strike
    inner: StorageFactory

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def settings(self) -> Any:
        return self.inner.settings

    def bind(self, group: GroupInfo, layout: Any) -> Any:
        self.strike.at("create")
        made: Any = self.inner.bind(group, layout)
        made.fetch = self.strike.around("storage", made.fetch)
        return made


class Faulty(Plugin):
    """Wraps what the other plugins of a stack do, on every rank alike."""

    name = "faulty"

    def __init__(self, strike: Strike) -> None:
        """Fails when ``strike`` says so."""
        self.strike = strike
        self.settings = ""

    @hookimpl
    def polyshard_observer(self, group: GroupInfo) -> Observer:
        """Fails in a group of :data:`PLACE`."""
        self.strike.at("contribution")
        return _Watcher(self.strike)

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> Any:
        """Around the part that keeps the shards."""
        if self.strike.fault not in ("storage", "create"):
            return None
        return Around(lambda inner: _Storage(self.strike, inner))


class FaultyCodec(Faulty):
    """The same with a codec: around the stack's."""

    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> Any:
        """Around the codec of another plugin."""
        return Around(lambda inner: _Codec(self.strike, inner))


class OwnCodec(Faulty):
    """The same where no other plugin of the stack has a codec."""

    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> Any:
        """Ships raw bytes."""
        return _Codec(self.strike)
