"""Every private torch name the plugin uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.variable import Variable

from polyshard._torch.private import in_backward

__all__ = [
    "at_end_of_backward",
    "norms_of",
    "shell",
]


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor, all of one dtype (0-dim, fp32 at least)."""
    if not tensors:
        return []
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    found: Any = torch._foreach_norm(list(tensors), 2, dtype=dtype)
    return list(found)


def at_end_of_backward(action: Callable[[], None]) -> None:
    """Call ``action`` when the backward that runs now has ended; never if it raises, or none runs.

    Gradients also land in ``finalize_backward()``, after all backwards.
    """
    if in_backward():
        engine: Any = Variable._execution_engine
        engine.queue_callback(action)


def shell(kind: type[Tensor], model: Tensor) -> Tensor:
    """A tensor of the subclass ``kind`` with shape and dtype of ``model``, and no memory."""
    make: Any = torch.Tensor._make_wrapper_subclass
    made: Tensor = make(kind, model.shape, dtype=model.dtype, device=model.device)
    return made
