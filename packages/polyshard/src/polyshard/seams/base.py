"""What all seams share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any


class Named:
    """Anything that shows up in a plan.

    A subclass says each as a class attribute, an attribute that it sets, or a property.
    """

    # To mypy these are read-only, so that all three may override them; at run time they are plain
    # attributes, so that an instance can set its own.
    if TYPE_CHECKING:

        @property
        def name(self) -> str:
            """Short public name, as in error messages and ``describe()``."""
            raise NotImplementedError

        @property
        def settings(self) -> str:
            """All settings that change results or sizes, as text; compared across ranks."""
            raise NotImplementedError

        @property
        def notices(self) -> tuple[str, ...]:
            """What ``describe()`` says of the group; read after it was bound."""
            raise NotImplementedError

    else:
        name: str
        settings: str = ""
        notices: tuple[str, ...] = ()


def overrides(method: Callable[..., Any], default: Callable[..., Any]) -> bool:
    """Whether ``method``, looked up on an object, is its own and not the ``default`` of its base.

    For plan time: what a step needs of it is kept as a plain attribute.
    """
    return (method.__func__ if inspect.ismethod(method) else method) is not default
