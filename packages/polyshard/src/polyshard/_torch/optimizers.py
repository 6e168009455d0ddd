"""What is private about ``torch.optim``, and about reading many tensors at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

__all__ = [
    "gradients_of", "like", "local_of", "locals_of", "plain_step", "profiled", "quick_reads",
    "repointed", "spec_of", "specs_of", "state_of",
]  # fmt: skip

Step = Callable[[Any], object]
# Mapped over many, they take less time than loops.
_LOCAL, _SPEC, _GRADIENT = map(attrgetter, ("_local_tensor", "_spec", "grad"))


def plain_step(kind: type[Optimizer]) -> Step:
    """The class's ``step`` without the step hooks and the profiler range torch puts around it."""
    step: Any = kind.step
    return cast(Step, step.__wrapped__ if getattr(step, "hooked", False) else step)


def profiled(step: Callable[..., Any]) -> Any:
    """``step`` with step hooks and profiler range, marked so that torch does not add them again."""
    wrapped: Any = Optimizer.profile_hook_step(step)
    wrapped.hooked = True
    return wrapped


def state_of(optimizer: Optimizer) -> defaultdict[Any, Any]:
    """``optimizer.state``, read without its knowing. See [Note: sealed state]."""
    return cast("defaultdict[Any, Any]", optimizer.__dict__["state"])


def quick_reads() -> AbstractContextManager[Any]:
    """Attributes of tensor subclasses are read as plain ones are: in a fourth of the time."""
    return cast("AbstractContextManager[Any]", torch._C.DisableTorchFunctionSubclass())


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


def locals_of(values: Sequence[Tensor]) -> list[Tensor]:
    """Of many ``DTensor`` s at once."""
    return list(map(_LOCAL, values))


def gradients_of(values: Sequence[Tensor]) -> list[Tensor | None]:
    """Of many tensors at once."""
    return list(map(_GRADIENT, values))


def specs_of(values: Sequence[Tensor]) -> list[object]:
    """Of many ``DTensor`` s at once."""
    return list(map(_SPEC, values))
