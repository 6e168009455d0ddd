"""Collectives of one process that plays one rank of many, all of which hold the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from polyshard._torch.recording import GroupBase, WorkBase, registered_name, unwatched

BACKEND = "recorded"


class Watcher(Protocol):
    """What is told about collectives."""

    def collective(
        self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], *, is_async: bool
    ) -> Any:
        """A collective was launched; what :meth:`finish` is to be called with."""
        ...

    def finish(self, token: Any) -> None:
        """The current stream continues after a collective."""
        ...


class RecordedWork(WorkBase):  # type: ignore[misc]
    """A collective under way, to wait for."""

    def __init__(self, watcher: Watcher, token: Any) -> None:
        super().__init__()
        self._watcher = watcher
        self._token = token

    def wait(self, timeout: object = None) -> bool:
        """As with NCCL: the stream waits, the host does not."""
        del timeout
        self._watcher.finish(self._token)
        return True


class RecordedGroup(GroupBase):  # type: ignore[misc]
    """A process group whose other ranks do what this one does."""

    def __init__(self, rank: int, size: int, watcher: Watcher) -> None:
        super().__init__(rank, size)
        self._description = ""
        self._watcher = watcher

    @property
    def group_name(self) -> str:
        """As torch registered it."""
        return registered_name(self)

    @property
    def group_desc(self) -> str:
        """What it was made for."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getBackendName(self) -> str:  # noqa: N802
        """As in ``dist.get_backend``."""
        return BACKEND

    def _launch(
        self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], opts: Any
    ) -> RecordedWork:
        is_async = bool(getattr(opts, "asyncOp", False))
        token = self._watcher.collective(name, reads, writes, is_async=is_async)
        return RecordedWork(self._watcher, token)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> RecordedWork:
        """Every rank sends what this one has."""
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], sources: Sequence[Tensor], opts: Any = None
    ) -> RecordedWork:
        """Several at once."""
        with unwatched():
            for output, source in zip(outputs, sources, strict=True):
                output.view(self.size(), -1).copy_(source.reshape(1, -1).clone())
        return self._launch("all-gather", sources, outputs, opts)

    def reduce_scatter_single(
        self, output: Tensor, source: Tensor, opts: Any = None
    ) -> RecordedWork:
        """The sum over ranks that all have what this one has."""
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], sources: Sequence[Tensor], opts: Any = None
    ) -> RecordedWork:
        """Several at once."""
        with unwatched():
            for output, source in zip(outputs, sources, strict=True):
                mine = source.view(self.size(), -1)[self.rank()]
                output.view(-1).copy_(mine * self.size())
        return self._launch("reduce-scatter", sources, outputs, opts)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> RecordedWork:
        """The sum over ranks that all have what this one has."""
        with unwatched():
            for tensor in tensors:
                tensor.mul_(self.size())
        return self._launch("all-reduce", tensors, tensors, opts)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], sources: Sequence[Tensor], opts: Any = None
    ) -> RecordedWork:
        """Into one tensor a rank."""
        with unwatched():
            for rows, source in zip(outputs, sources, strict=True):
                for row in rows:
                    row.copy_(source)
        return self._launch("all-gather", sources, [r for rows in outputs for r in rows], opts)

    def all_to_all_single(
        self, output: Tensor, source: Tensor, *sizes: Any, opts: Any = None
    ) -> RecordedWork:
        """Every rank gets the rows that this one would send to itself."""
        with unwatched():
            mine = source.view(self.size(), -1)[self.rank()].clone()
            output.view(self.size(), -1).copy_(mine)
        return self._launch("all-to-all", [source], [output], opts or (sizes and sizes[-1]))

    # As torch called them up to 2.12.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


@contextmanager
def one_of(size: int, watcher: Watcher, rank: int = 0) -> Iterator[None]:
    """Be one rank of ``size``; there is no other process."""

    def create(store: object, rank: int, size: int, timeout: object) -> RecordedGroup:
        del store, timeout
        return RecordedGroup(rank, size, watcher)

    if BACKEND in dist.Backend.backend_list:
        dist.Backend._plugins.pop(BACKEND.upper(), None)
    dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def bytes_of(tensor: Tensor) -> tuple[int, int] | None:
    """First byte and end of what a tensor may touch; ``None`` if that is nothing."""
    if tensor.is_meta or tensor.numel() == 0 or tensor.layout is not torch.strided:
        return None
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    start = tensor.data_ptr()
    return start, start + span * tensor.itemsize
