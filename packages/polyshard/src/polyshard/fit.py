"""Whether an object has what a seam asks for: said where it is given, not where it is used."""

from __future__ import annotations

import functools
import inspect
from typing import Protocol, TypeVar

from polyshard.errors import PluginError

T = TypeVar("T")


class HasName(Protocol):
    """Whatever an error can call by its name."""

    @property
    def name(self) -> str:
        """Short public name."""
        ...


@functools.cache
def members_of(seam: type) -> tuple[str, ...]:
    """Public names that a protocol asks for."""
    own = [base for base in seam.__mro__ if base.__module__ == seam.__module__]
    names = {n for base in own for n in (*vars(base), *inspect.get_annotations(base))}
    return tuple(sorted(n for n in names if not n.startswith("_")))


def misfit(value: object, seam: type) -> str | None:
    """What is wrong with ``value`` as a ``seam``, to be read after "returned"; else ``None``."""
    if isinstance(value, type):
        return f"the class {value.__name__}; return an instance"
    missing = [name for name in members_of(seam) if not hasattr(value, name)]
    if not missing:
        return None
    return (
        f"a {type(value).__name__}, which lacks {', '.join(missing)} of "
        f"{seam.__module__}.{seam.__name__}"
    )


def fitting(value: T, seam: type, factory: HasName, method: str) -> T:
    """``value``, which ``factory.method(...)`` returned.

    Raises:
        PluginError: naming the factory, when it does not fit ``seam``.
    """
    if value is not None and (problem := misfit(value, seam)):
        call = f"{type(factory).__name__}.{method}"
        raise PluginError(f"'{factory.name}': {call} returned {problem}")
    return value


def wordless(answer: object, part: object, method: str) -> None:
    """Refuse an ``answer`` of a method that writes into what it was given.

    Raises:
        PluginError: because what was returned would be dropped, and what was sent is garbage.
    """
    if answer is not None:
        raise PluginError(
            f"{type(part).__name__}.{method} returned a {type(answer).__name__}, which would be "
            "dropped; write into the tensors it is given, and return nothing."
        )
