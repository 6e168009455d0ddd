"""Hooks that ``torch.compile`` leaves alone.

Compilation breaks the graph at a hook and goes on with the module's own forward, which is what one
wants to compile: a hook waits for transfers and changes registered parameters. Importing dynamo
takes seconds, so it is asked only where somebody else has imported it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """``function``, never traced, nor anything it calls."""
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return cast("F", call)
