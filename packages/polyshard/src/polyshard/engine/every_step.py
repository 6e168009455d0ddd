"""Calls at the steps of all optimizers of the process, for owners that may go at any time.

[Note: hooks that stay]
torch iterates over its hooks of all optimizers' steps, and the garbage collector may take an owner
in the middle of that: a hook that went with its owner would break the step. So torch gets one hook
for each end of a step. It stays, and calls what lives.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from polyshard._torch.private import untraced

T = TypeVar("T")
Calls = weakref.WeakKeyDictionary[Any, Callable[[Any, Optimizer], None]]


def before_every_step(owner: T, call: Callable[[T, Optimizer], None]) -> None:
    """Have ``call(owner, optimizer)`` run before each step of any optimizer while ``owner`` lives.

    ``call`` is not to hold ``owner``, which would live for ever. The step raises what it raises. A
    second call of an owner takes the place of its first.
    """
    _calls(register_optimizer_step_pre_hook)[owner] = call


def after_every_step(owner: T, call: Callable[[T, Optimizer], None]) -> None:
    """The same after each step."""
    _calls(register_optimizer_step_post_hook)[owner] = call


@functools.cache
def _calls(register: Callable[[Callable[..., None]], object]) -> Calls:
    """Those of the process, called from a hook of torch's. See [Note: hooks that stay]."""
    calls: Calls = weakref.WeakKeyDictionary()
    register(untraced(partial(_call_all, calls)))
    return calls


def _call_all(calls: Calls, optimizer: Optimizer, args: object, kwargs: object) -> None:
    del args, kwargs
    for owner, call in list(calls.items()):
        call(owner, optimizer)
