"""Each rank reads the bytes of its own shards, at their places in the files, into its shards."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from polyshard_checkpoint.safetensors.blocks import READERS, boxed, fill
from polyshard_checkpoint.safetensors.header import Stored, read_header
from polyshard_checkpoint.safetensors.origin import Piece, Traced, narrowed

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"


def weight_files(place: str | os.PathLike[str], stem: str) -> list[Path]:
    """The files of one model: the one of that name, or those of its index, or all there are.

    In the order of ``from_pretrained``: ``save_pretrained`` leaves the index of an earlier model.

    Raises:
        CheckpointError: when there are none, or the index names some that are not there.
    """
    path = Path(place)
    if path.is_file():
        return [path]
    if (single := path / f"{stem}{SUFFIX}").is_file():
        return [single]
    if (index := path / f"{stem}{INDEX}").is_file():
        try:
            named = sorted(
                {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"'{index}' is no index of files: {type(error).__name__}: {error}"
            ) from error
        found = [path / name for name in named]
        outside = [name for name in named if Path(name).name != name]
        if lost := outside or [file.name for file in found if not file.is_file()]:
            raise CheckpointError(
                f"'{index.name}' names files that are not in '{path}': {', '.join(lost)}"
            )
        return found
    return sorted(path.glob(f"*{SUFFIX}"))


class SafetensorsReader(StorageReader):
    """Loads safetensors files with ``torch.distributed.checkpoint``.

    A rank reads the headers and what it holds of each tensor, and needs at most 16 MiB besides the
    tensors that it fills. Values are converted to the dtype of what they fill.
    """

    def __init__(self, folder: str | os.PathLike[str], files: Sequence[Path] | None = None) -> None:
        """Look at the headers at once, of all files in ``folder`` or of those given.

        Raises:
            CheckpointError: when there are none, one is no such file, or two hold the same name.
        """
        self._path = Path(folder)
        self._found: dict[str, tuple[Path, Stored]] = {}
        for path in sorted(self._path.glob(f"*{SUFFIX}")) if files is None else files:
            for name, stored in read_header(path).items():
                if name in self._found:
                    other = self._found[name][0].name
                    raise CheckpointError(f"'{name}' is in both {other} and {path.name}")
                self._found[name] = path, stored
        if not self._found:
            raise CheckpointError(f"there is no tensor in any *{SUFFIX} file of '{self._path}'")
        self._made = {
            name: Traced.stored(name, s.shape, s.dtype) for name, s in self.stored.items()
        }

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._found)

    @property
    def stored(self) -> Mapping[str, Stored]:
        """The tensors in the files."""
        return {name: stored for name, (_, stored) in self._found.items()}

    def make(self, made: Mapping[str, Traced]) -> None:
        """Offer the tensors ``made``, computed from those in the files, instead of them."""
        self._made = dict(made)

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: _metadata(made) for name, made in self._made.items()})

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        targets = [planner.resolve_tensor(item).detach() for item in plan.items]
        reads = [
            (*self._found[piece.name], piece, target)
            for item, target in zip(plan.items, targets, strict=True)
            for piece in _asked(self._made[item.storage_index.fqn], item).pieces
        ]
        reads.sort(key=lambda read: (read[0], _begin(read[1], read[2])))
        with ExitStack() as stack:
            files: dict[Path, int] = {}
            for path in {path: None for path, *_ in reads}:
                files[path] = os.open(path, os.O_RDONLY)
                stack.callback(os.close, files[path])

            def read(path: Path, stored: Stored, piece: Piece, target: Tensor) -> None:
                part = boxed(target, piece.offsets, tuple(piece.view.shape))
                fill(part, piece.view, stored, files[path])

            pool = stack.enter_context(ThreadPoolExecutor(READERS))
            for _ in pool.map(read, *zip(*reads, strict=True)):
                pass
        for item, target in zip(plan.items, targets, strict=True):
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


def _begin(stored: Stored, piece: Piece) -> int:
    return stored.begin + int(piece.view.storage_offset()) * stored.dtype.itemsize


def _metadata(made: Traced) -> TensorStorageMetadata:
    chunk = ChunkStorageMetadata(torch.Size([0] * made.ndim), made.shape)
    return TensorStorageMetadata(TensorProperties(dtype=made.dtype), made.shape, [chunk])


def _asked(made: Traced, item: ReadItem) -> Traced:
    """The part of a tensor that ``item`` asks for."""
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        made = narrowed(made, dim, start, length)
    return made
