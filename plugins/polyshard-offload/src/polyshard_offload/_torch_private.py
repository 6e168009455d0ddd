"""Every private torch name the plugin uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.variable import Variable
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

__all__ = [
    "at_end_of_backward",
    "is_patched",
    "like",
    "local_of",
    "norms_of",
    "plain_step",
    "profiled",
    "repointed",
    "shell",
    "spec_of",
]

Step = Callable[[Any], object]


def local_of(value: Tensor) -> Tensor:
    """The local tensor of a ``DTensor`` itself; a plain tensor as it is."""
    return value._local_tensor if isinstance(value, DTensor) else value


def spec_of(value: Tensor) -> object | None:
    """Mesh, placements and global shape of a ``DTensor``; ``None`` for a plain tensor."""
    return value._spec if isinstance(value, DTensor) else None


def like(spec: object | None, local: Tensor) -> Tensor:
    """``local`` as a ``DTensor`` of ``spec``; unlike ``from_local`` it may rest off the mesh."""
    return local if spec is None else DTensor(local, cast(Any, spec), requires_grad=False)


def repointed(old: object, new: Tensor) -> Tensor:
    """``old`` over the memory of ``new`` (a window) where it is such a tensor; else ``new``."""
    if type(old) is not type(new) or not isinstance(old, Tensor):
        return new
    alike = old.shape == new.shape and old.dtype == new.dtype and old.device == new.device
    if not alike or old.requires_grad or old.is_inference():
        return new
    if isinstance(old, DTensor):
        if spec_of(old) != spec_of(new):
            return new
        old._local_tensor = local_of(new)
    else:
        old.data = new
    return old


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor, all of one dtype (0-dim, fp32 at least)."""
    if not tensors:
        return []
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    found: Any = torch._foreach_norm(list(tensors), 2, dtype=dtype)
    return list(found)


def plain_step(kind: type[Optimizer]) -> Step:
    """The class's ``step`` without the step hooks and the profiler range torch puts around it."""
    step: Any = kind.step
    return cast(Step, step.__wrapped__ if getattr(step, "hooked", False) else step)


def profiled(step: Callable[..., None]) -> Any:
    """``step`` with step hooks and profiler range, marked so that torch does not add them again."""
    wrapped: Any = Optimizer.profile_hook_step(step)
    wrapped.hooked = True
    return wrapped


def is_patched(optimizer: Optimizer) -> bool:
    """Whether somebody (a learning rate scheduler) replaced ``step`` on the object."""
    return "step" in optimizer.__dict__


def at_end_of_backward(action: Callable[[], None]) -> None:
    """Call ``action`` when the backward that runs now has ended; never if it raises."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(action)


def shell(kind: type[Tensor], model: Tensor) -> Tensor:
    """A tensor of the subclass ``kind`` with shape and dtype of ``model``, and no memory."""
    make: Any = torch.Tensor._make_wrapper_subclass
    made: Tensor = make(kind, model.shape, dtype=model.dtype, device=model.device)
    return made
