"""Each rank writes the bytes of its own shards to their places in files that all share."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata, SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from polyshard.errors import CheckpointError
from polyshard.files import replace_file, sync_folder
from polyshard_checkpoint.safetensors.blocks import BLOCK_BYTES, Block, memory_of, places, split
from polyshard_checkpoint.safetensors.header import Stored, make_header, read_header

Described = tuple[torch.dtype, torch.Size]


@dataclass(frozen=True)
class _Layout:
    """Which file a tensor is in, and where."""

    files: Mapping[str, Path]
    stored: Mapping[str, Stored]


class SafetensorsWriter(StorageWriter):
    """Saves tensors with ``torch.distributed.checkpoint`` as safetensors files.

    The files are those of a model in one piece, ``model.safetensors`` or ``model-00001-of-00002``
    and so on with an index, or of another ``stem``. They get these names when all are written. All
    ranks must see the folder.
    """

    def __init__(
        self, folder: str | os.PathLike[str], file_bytes: int, stem: str = "model"
    ) -> None:
        """Write files of at most ``file_bytes`` of tensors, or one tensor, each.

        Raises:
            CheckpointError: when ``folder`` holds safetensors files already.
        """
        self._folder = Path(folder)
        self._file_bytes = file_bytes
        self._stem = stem
        self._layout = _Layout({}, {})
        if there := sorted(self._folder.glob("*.safetensors")):
            raise CheckpointError(
                f"'{self._folder}' holds {there[0].name} already; remove the old files first"
            )

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        plain = [i.index.fqn for i in plan.items if i.tensor_data is None]
        if plain:
            raise CheckpointError(f"safetensors files hold tensors only, not {', '.join(plain)}")
        return plan

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lay out the files and make them, for all ranks to write into."""
        tensors = dict(sorted(item for plan in plans for item in _described(plan)))
        self._folder.mkdir(parents=True, exist_ok=True)
        groups = list(file_groups(tensors, self._file_bytes))
        files: dict[str, Path] = {}
        stored: dict[str, Stored] = {}
        for index, names in enumerate(groups, 1):
            path = self._folder / f".{self._stem}-{index:05d}-of-{len(groups):05d}.unfinished"
            make_file(path, {name: tensors[name] for name in names})
            found = read_header(path)
            stored |= found
            files |= dict.fromkeys(found, path)
        self._layout = _Layout(files, stored)
        return [replace(plan, storage_data=self._layout) for plan in plans]

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        layout: _Layout = plan.storage_data
        descriptors: dict[Path, int] = {}
        results = []
        try:
            for item in plan.items:
                path = layout.files[item.index.fqn]
                if path not in descriptors:
                    descriptors[path] = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
                value = planner.resolve_data(item)
                assert isinstance(value, Tensor)
                stored = layout.stored[item.index.fqn]
                _write(value.detach(), item, stored, descriptors[path])
                results.append(WriteResult(item.index, value.nbytes, path.name))
            for descriptor in descriptors.values():
                os.fsync(descriptor)
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Give the files their names, and say in the index which holds what."""
        paths = sorted(set(self._layout.files.values()))
        final = {path: self._final_name(path, len(paths)) for path in paths}
        for path, name in final.items():
            path.rename(self._folder / name)
        if len(paths) > 1:
            weight_map = {name: final[path] for name, path in self._layout.files.items()}
            total = sum(stored.nbytes for stored in self._layout.stored.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            replace_file(
                self._folder / f"{self._stem}.safetensors.index.json",
                json.dumps(index, indent=2).encode(),
            )
        sync_folder(self._folder)

    def _final_name(self, path: Path, count: int) -> str:
        if count == 1:
            return f"{self._stem}.safetensors"
        return path.name.removeprefix(".").replace(".unfinished", ".safetensors")

    def remove_unfinished(self) -> None:
        """Take away what a save that failed has left."""
        for path in self._folder.glob(f".{glob.escape(self._stem)}-*.unfinished"):
            path.unlink(missing_ok=True)

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    @override
    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _described(plan: SavePlan) -> Iterator[tuple[str, Described]]:
    for item in plan.items:
        assert item.tensor_data is not None
        yield item.index.fqn, (item.tensor_data.properties.dtype, item.tensor_data.size)


def file_groups(tensors: Mapping[str, Described], most_bytes: int) -> Iterator[list[str]]:
    """Names that share a file."""
    group: list[str] = []
    held = 0
    for name, (dtype, shape) in tensors.items():
        size = shape.numel() * dtype.itemsize
        if group and held + size > most_bytes:
            yield group
            group, held = [], 0
        group.append(name)
        held += size
    yield group


def make_file(path: Path, tensors: Mapping[str, Described]) -> None:
    """A file with a header and room for the tensors."""
    path.unlink(missing_ok=True)
    header = make_header(tensors)
    size = sum(shape.numel() * dtype.itemsize for dtype, shape in tensors.values())
    with path.open("xb") as file:
        file.write(header)
        if size:
            os.posix_fallocate(file.fileno(), len(header), size)


def _write(value: Tensor, item: WriteItem, stored: Stored, file: int) -> None:
    """Write a rank's part of a tensor, block by block."""
    assert item.tensor_data is not None
    first = tuple(item.tensor_data.chunk.offsets)
    whole = Block(first, tuple(value.shape))
    for block in split(whole, max(1, BLOCK_BYTES // stored.dtype.itemsize)):
        part = value
        for dim, (begin, size) in enumerate(zip(block.offsets, block.sizes, strict=True)):
            part = part.narrow(dim, begin - first[dim], size)
        content = part.cpu().contiguous()
        for view, place in places(memory_of(content), block, stored):
            write_at(file, view, place)


def write_at(file: int, memory: memoryview, place: int) -> None:
    """Write all of ``memory`` from byte ``place`` of an open file on."""
    while memory:
        count = os.pwrite(file, memory, place)
        memory, place = memory[count:], place + count
