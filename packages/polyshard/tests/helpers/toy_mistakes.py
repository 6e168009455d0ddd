"""Plugins that are refused, each with what is wrong with it; and factories of none."""

from __future__ import annotations

from typing import Any

import pluggy
from toy_codecs import Codecs

from polyshard import Plugin, hookimpl

other_marker = pluggy.HookimplMarker("polyshrad")


class Mistaken(Plugin):
    """Everything pluggy would accept in silence."""

    name = "mistaken"

    def polyshard_observer(self, group: Any) -> None:
        """Forgotten marker."""

    @other_marker
    def polyshard_gather_codec(self, group: Any) -> None:
        """Marker of another project."""

    @hookimpl
    def polyshard_redcue_codec(self, group: Any) -> None:
        """Misspelt."""

    @hookimpl
    def polyshard_shard_storage(self, gruop: Any) -> None:
        """Unknown argument."""

    @hookimpl
    def polyshard_state_dict_adapter(self, group: Any = None) -> None:
        """A default hides the value."""

    @hookimpl
    def chunk_dtensor(self, *, tensor: Any) -> None:
        """Keyword only."""

    @hookimpl(wrapper=True)
    def polyshard_collectives_backend(self, group: Any) -> Any:
        """A wrapper."""
        return (yield)


class Needing(Codecs):
    name = "needing"
    requires = ("absent",)


class Future(Codecs):
    name = "future"
    hook_api = (2, 0)


class Able(Codecs):
    name = "able"
    provides = ("absent",)


class Declaring:
    polyshard_contract = {"name": "odd"}  # noqa: RUF012


class Spelt(Plugin):
    name = "odd"

    @hookimpl
    def polyshard_observer(self, gruop: object) -> None:
        """Misspelt argument."""


def nothing() -> None:
    """A factory that forgets to return."""
