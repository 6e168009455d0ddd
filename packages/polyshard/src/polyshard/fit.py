"""Whether an object has what a seam asks for: said where it is given, not where it is used."""

from __future__ import annotations

import functools
import inspect
from typing import TypeVar

from polyshard.errors import PluginError
from polyshard.seams import Named

T = TypeVar("T")


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
        f"polyshard.seams.{seam.__name__}"
    )


def fitting(value: T, seam: type, factory: Named, method: str) -> T:
    """``value``, which ``factory.method(...)`` returned.

    Raises:
        PluginError: naming the factory, when it does not fit ``seam``.
    """
    if value is not None and (problem := misfit(value, seam)):
        call = f"{type(factory).__name__}.{method}"
        raise PluginError(f"'{factory.name}': {call} returned {problem}")
    return value
