"""Each rank writes the bytes of its own shards to their places in files that all share."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import Metadata, SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from polyshard.errors import CheckpointError
from polyshard.files import replace_file, sync_folder
from polyshard_checkpoint.safetensors.blocks import boxed, put, whole_view
from polyshard_checkpoint.safetensors.header import (
    Described,
    Stored,
    in_order,
    make_header,
    read_header,
)
from polyshard_checkpoint.safetensors.origin import Piece, Traced, parts_within
from polyshard_checkpoint.safetensors.reading import INDEX, SUFFIX


@dataclass(frozen=True)
class Arrangement:
    """What files hold, made of tensors that are saved.

    Attributes:
        files: names of tensors that share a file, in the order of files.
        tensors: all of them.
        metadata: for the index, besides the bytes of all tensors.
    """

    files: Sequence[Sequence[str]]
    tensors: Mapping[str, Traced]
    metadata: Mapping[str, Any] = field(default_factory=dict)


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
        self,
        folder: str | os.PathLike[str],
        file_bytes: int,
        stem: str = "model",
        *,
        arrangement: Arrangement | None = None,
    ) -> None:
        """Write files of at most ``file_bytes`` of tensors, or one tensor, each.

        Args:
            folder: where to; made if it is not there.
            file_bytes: of tensors in a file at most.
            stem: what the files are called.
            arrangement: what they hold, alike on all ranks, and then old files are replaced; by
                default the tensors that are saved.

        Raises:
            CheckpointError: when ``folder`` holds safetensors files already, and there is no
                arrangement.
        """
        self._folder = Path(folder)
        self._file_bytes = file_bytes
        self._stem = stem
        self._arrangement = arrangement
        self._layout = _Layout({}, {})
        if arrangement is None and (there := sorted(self._folder.glob(f"*{SUFFIX}"))):
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
        if self._arrangement is None:
            tensors = dict(sorted(item for plan in plans for item in _described(plan)))
            groups: Sequence[Sequence[str]] = list(file_groups(tensors, self._file_bytes))
        else:
            tensors = {n: (t.dtype, t.shape) for n, t in self._arrangement.tensors.items()}
            groups = self._arrangement.files
        self._folder.mkdir(parents=True, exist_ok=True)
        files: dict[str, Path] = {}
        stored: dict[str, Stored] = {}
        for index, names in enumerate(groups, 1):
            path = self._folder / f".{self._stem}-{index:05d}-of-{len(groups):05d}.unfinished"
            make_file(path, in_order({name: tensors[name] for name in names}))
            found = read_header(path)
            stored |= found
            files |= dict.fromkeys(found, path)
        self._layout = _Layout(files, stored)
        return [replace(plan, storage_data=self._layout) for plan in plans]

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        layout: _Layout = plan.storage_data
        uses = self._uses()
        descriptors: dict[Path, int] = {}
        results = []
        try:
            for item in plan.items:
                value = planner.resolve_data(item)
                assert isinstance(value, Tensor)
                for name, offsets, part in _parts(item, value.detach(), uses):
                    path = layout.files[name]
                    if path not in descriptors:
                        descriptors[path] = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
                    stored = layout.stored[name]
                    where = boxed(whole_view(stored), offsets, tuple(part.shape))
                    put(part, where, stored, descriptors[path])
                results.append(WriteResult(item.index, value.nbytes, self._stem))
            for descriptor in descriptors.values():
                os.fsync(descriptor)
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _uses(self) -> Mapping[str, list[tuple[str, Piece]]] | None:
        """What is made of each saved tensor; ``None``: the one of its name, of all of it."""
        if self._arrangement is None:
            return None
        found: dict[str, list[tuple[str, Piece]]] = {}
        for name, tensor in self._arrangement.tensors.items():
            for piece in tensor.pieces:
                found.setdefault(piece.name, []).append((name, piece))
        return found

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Give the files their names, and say in the index which holds what."""
        paths = sorted(set(self._layout.files.values()))
        final = {path: self._final_name(path, len(paths)) for path in paths}
        for path, name in final.items():
            path.rename(self._folder / name)
        index_path = self._folder / f"{self._stem}{INDEX}"
        if len(paths) > 1:
            weight_map = {name: final[path] for name, path in self._layout.files.items()}
            about = {"total_size": sum(s.nbytes for s in self._layout.stored.values())}
            if self._arrangement is not None:
                about |= self._arrangement.metadata
            index = {"metadata": about, "weight_map": weight_map}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            replace_file(index_path, text.encode())
        else:
            index_path.unlink(missing_ok=True)
        for path in self._folder.glob(f"{glob.escape(self._stem)}*{SUFFIX}"):
            is_old = re.fullmatch(rf"{re.escape(self._stem)}(-\d{{5}}-of-\d{{5}})?", path.stem)
            if is_old and path.name not in final.values():
                path.unlink()
        sync_folder(self._folder)

    def _final_name(self, path: Path, count: int) -> str:
        if count == 1:
            return f"{self._stem}{SUFFIX}"
        return path.name.removeprefix(".").replace(".unfinished", SUFFIX)

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


def _parts(
    item: WriteItem, value: Tensor, uses: Mapping[str, list[tuple[str, Piece]]] | None
) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """Parts of what a rank saves: each one's tensor in the files, its place there, its values."""
    assert item.tensor_data is not None
    offsets = tuple(item.tensor_data.chunk.offsets)
    if uses is None:
        yield item.index.fqn, offsets, value
        return
    for name, piece in uses.get(item.index.fqn, ()):
        for begin, part in parts_within(piece, item.tensor_data.size, offsets, value):
            yield name, begin, part
