"""A plugin that the conformance kit is to judge, and what it ought to say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class Right:
    """A plugin that the kit must pass."""

    factory: Callable[[], object]
    tolerance: float = 0.0
    loss_tolerance: float | None = None


@dataclass(frozen=True)
class Wrong:
    """A plugin that the kit must fail in the test that is about its fault."""

    factory: Callable[[], object]
    found_by: str
    tolerance: float = 0.0


@dataclass(frozen=True)
class Samples:
    """Those of one seam."""

    right: Sequence[Right]
    wrong: Sequence[Wrong]


def variant(plugin: type, name: str, **attributes: object) -> Callable[[], object]:
    """Make a factory of ``plugin`` with other class attributes, under another name."""
    factory = partial(_made, plugin, name, attributes)  # ranks get it pickled, unlike a new class
    factory.__name__ = name  # type: ignore[attr-defined]
    return factory


def _made(plugin: type, name: str, attributes: dict[str, object]) -> object:
    return type(name, (plugin,), dict(attributes))()
