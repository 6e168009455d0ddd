"""The ranks that train the same parameters, and what they tell each other about them.

[Note: one verdict]
Parameters may have meshes of several axes, and different meshes, so there need not be a process
group of all ranks concerned. A message visits every group of every axis in turn, in the order in
which parameters name them, which is the same on all ranks: what one rank knows has then reached
all ranks of the product of the axes. Each is one number; names travel only when something is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

T = TypeVar("T")
Axis = tuple[DeviceMesh, int]


class Peers:
    """Ranks that hold parts or replicas of the same parameters. See [Note: one verdict]."""

    def __init__(
        self, parameters: Iterable[Tensor], group: dist.ProcessGroup | None = None
    ) -> None:
        """Those of the parameters' meshes, or of ``group`` where it is given."""
        axes = {m.get_group(a): m.device_type for p in parameters for m, a in axes_of(p)}
        kinds = list(axes.values()) if group is None else [_device_of(group)]
        self.device = torch.device(kinds[0] if kinds else "cpu")
        self._groups = list(axes) if group is None else [group]

    def any(self, found: Tensor) -> bool:
        """Whether ``found`` (a 0-dim bool) is true on any rank; waits for an accelerator once."""
        if not self._groups:
            return bool(found)
        verdict = found.to(self.device, torch.int32).view(1)
        for group in self._groups:
            dist.all_reduce(verdict, dist.ReduceOp.MAX, group=group)
        return bool(verdict.item())

    def union(self, found: Sequence[T]) -> list[T]:
        """What all ranks have found, each piece once."""
        every = list(found)
        for group in self._groups:
            every = list(dict.fromkeys(one for each in gathered(every, group) for one in each))
        return every


def axes_of(parameter: Tensor) -> Iterator[Axis]:
    """The axes of its mesh that have more than one rank."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        yield from ((mesh, axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1)


def meshes_of(parameters: Iterable[Tensor]) -> list[DeviceMesh]:
    """Those that parameters are on, each once; others hold them after a resize."""
    found = {id(p.device_mesh): p.device_mesh for p in parameters if isinstance(p, DTensor)}
    return list(found.values())


def are_same(one: Sequence[DeviceMesh], other: Sequence[DeviceMesh]) -> bool:
    """Whether these are the very same meshes: an equal one may have other process groups."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def gathered(value: T, group: dist.ProcessGroup) -> list[T]:
    """``value`` of every rank of ``group``."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def this_rank() -> int:
    """Of all ranks of the job; 0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def _device_of(group: dist.ProcessGroup) -> str:
    if "gloo" in dist.get_backend(group):
        return "cpu"
    found = torch.accelerator.current_accelerator()
    return "cpu" if found is None else found.type


def ranks_in_words(ranks: Iterable[int]) -> str:
    """``rank 1``, or ``ranks 0, 1 and 3``."""
    every = [str(rank) for rank in sorted(set(ranks))]
    if len(every) == 1:
        return f"rank {every[0]}"
    return f"ranks {', '.join(every[:-1])} and {every[-1]}"
