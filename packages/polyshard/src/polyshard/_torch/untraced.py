"""Hooks that ``torch.compile`` leaves alone.

A hook waits for transfers and changes registered parameters. A module with hooks is not compiled
as a whole: dynamo runs ``__call__`` as it is and compiles each function that it calls, the module's
own forward among them, which is what one wants to compile. Hooks are functions it calls too. So the
frame of the wrapper is marked to be skipped, before dynamo ever sees it: then a compiled module
has no graph break at its own hooks, and ``fullgraph=True`` holds for it. Where dynamo inlines the
call of a module into another graph it asks for no frame, and breaks the graph at the hook.

Importing dynamo takes seconds, so it is asked only where somebody else has imported it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame

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

    skip_frames_of(call)
    return cast("F", call)


def skip_frames_of(function: Callable[..., Any]) -> None:
    """Have dynamo run ``function`` as it is, whichever compiled function it is called from."""
    action = eval_frame._FrameAction
    # What it calls is looked at as ever: the wrapper asks dynamo itself to look away.
    strategy = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
