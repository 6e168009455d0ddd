"""Each rank reads the bytes of its own shards, at their places in the files, into its shards."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, ReadItem, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future
from typing_extensions import override

from polyshard.errors import CheckpointError
from polyshard_checkpoint.safetensors.blocks import BLOCK_BYTES, Block, memory_of, places, split
from polyshard_checkpoint.safetensors.header import Stored, read_header

SUFFIX = ".safetensors"


class SafetensorsReader(StorageReader):
    """Loads safetensors files with ``torch.distributed.checkpoint``.

    A rank reads the headers and what it holds of each tensor, and needs at most 16 MiB besides the
    tensors that it fills. Values are converted to the dtype of what they fill.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Look at the headers of all files in ``folder`` at once.

        Raises:
            CheckpointError: when there are none, one is no such file, or two hold the same name.
        """
        self._path = Path(folder)
        self._found: dict[str, tuple[Path, Stored]] = {}
        for path in sorted(self._path.glob(f"*{SUFFIX}")):
            for name, stored in read_header(path).items():
                if name in self._found:
                    other = self._found[name][0].name
                    raise CheckpointError(f"'{name}' is in both {other} and {path.name}")
                self._found[name] = path, stored
        if not self._found:
            raise CheckpointError(f"there is no tensor in any *{SUFFIX} file of '{self._path}'")

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors."""
        return frozenset(self._found)

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: _metadata(stored) for name, (_, stored) in self._found.items()})

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with ExitStack() as stack:
            open_files: dict[Path, int] = {}
            for item in plan.items:
                path, stored = self._found[item.storage_index.fqn]
                if path not in open_files:
                    open_files[path] = os.open(path, os.O_RDONLY)
                    stack.callback(os.close, open_files[path])
                target = planner.resolve_tensor(item).detach()
                _fill(target, item, stored, open_files[path])
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @override
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None: ...

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    @override
    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()


def _metadata(stored: Stored) -> TensorStorageMetadata:
    chunk = ChunkStorageMetadata(torch.Size([0] * len(stored.shape)), stored.shape)
    return TensorStorageMetadata(TensorProperties(dtype=stored.dtype), stored.shape, [chunk])


def _fill(target: Tensor, item: ReadItem, stored: Stored, file: int) -> None:
    """Read what ``item`` asks for into ``target``, block by block."""
    first = tuple(item.storage_offsets)
    wanted = Block(first, tuple(item.lengths))
    for block in split(wanted, max(1, BLOCK_BYTES // stored.dtype.itemsize)):
        content = torch.empty(block.sizes, dtype=stored.dtype, device="cpu")
        for view, place in places(memory_of(content), block, stored):
            _read(file, view, place)
        part = target
        for dim, (begin, size) in enumerate(zip(block.offsets, block.sizes, strict=True)):
            part = part.narrow(dim, begin - first[dim], size)
        part.copy_(content)


def _read(file: int, memory: memoryview, place: int) -> None:
    while memory:
        count = os.preadv(file, [memory], place)
        if count == 0:
            raise CheckpointError("a safetensors file became shorter while it was read")
        memory, place = memory[count:], place + count
