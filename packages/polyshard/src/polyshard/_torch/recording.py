"""Private names of torch that the stand-in for an accelerator needs (see ``testing.streams``)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "DispatchMode",
    "FakeTensor",
    "GroupBase",
    "WorkBase",
    "registered_name",
    "storage_id",
    "unwatched",
]

DispatchMode: Any = TorchDispatchMode
"""Sees every operation on tensors."""

WorkBase: Any = dist._Work
"""What collectives return."""

GroupBase: Any = dist.ProcessGroup
"""A process group, whose methods torch overloads in ways that Python code cannot repeat."""


def registered_name(group: dist.ProcessGroup) -> str:
    """The name under which torch knows ``group``; those made in Python are not told it."""
    return str(distributed_c10d._world.pg_names[group])


def storage_id(storage: torch.UntypedStorage) -> int:
    """The same for all tensors that share memory through torch."""
    number: int = storage._cdata
    return number


def unwatched() -> AbstractContextManager[Any]:
    """Operations of the block are seen by no mode."""
    return cast("AbstractContextManager[Any]", _disable_current_modes())
