"""Function transforms of ``torch.func``, and work inside of them that is not of them.

A transform (``jvp``, ``grad``, ``vmap``) wraps every tensor that is made while it runs. What the
engine does around a module's computation is no part of the function transformed: parameters are
gathered into memory of their own, and leaves that outlive the transform must not be wrapped for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def transforms_run() -> bool:
    """Whether the caller runs inside a transform of ``torch.func``."""
    return torch._C._are_functorch_transforms_active()


def outside_transforms(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which handles plain tensors even where a transform runs."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch._C._are_functorch_transforms_active():
            return function(*args, **kwargs)
        with torch._C._DisableFuncTorch():
            return function(*args, **kwargs)

    return call
