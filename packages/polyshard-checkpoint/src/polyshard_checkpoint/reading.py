"""Reading checkpoints of ``torch.distributed.checkpoint`` without running what they say.

[Note: pickles in checkpoints]
Tensors of such a checkpoint are read with ``weights_only=True``. Two things are not: the file
``.metadata``, which is a pickle, and values that are no tensors, which the default planner loads as
any pickle. A pickle names functions to call, so the author of a checkpoint could run code in
the process that loads it. The reader here resolves only the classes that torch's own metadata
consists of, and the planner only what ``weights_only=True`` admits; anything else is an error that
names it, before it is called.

    dcp.load(state, storage_reader=CheckpointReader(path), planner=CheckpointPlanner())
"""

from __future__ import annotations

import enum
import io
import os
import pathlib
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    Metadata,
    ReadItem,
)
from torch.distributed.checkpoint.metadata import StorageMeta
from typing_extensions import override

from polyshard._torch.private import metadata_classes
from polyshard.errors import CheckpointError

__all__ = ["CheckpointPlanner", "CheckpointReader"]


class _MetadataUnpickler(pickle.Unpickler):
    """Resolves what a checkpoint's metadata consists of, and nothing else."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        known = metadata_classes().get((module, name))
        if known is not None:
            return known
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return pathlib.PurePath  # where the checkpoint was once written to
        if (module, name) == ("builtins", "getattr"):
            return _member  # Python 3.11.0 to 3.11.3 (Debian 12) pickles members of enumerations so
        raise CheckpointError(f"it names {module}.{name}, which no checkpoint of tensors needs")


def _member(kind: object, name: object) -> enum.Enum:
    """What ``getattr`` is let do: find a member of an enumeration."""
    if isinstance(kind, enum.EnumType) and isinstance(name, str) and name in kind.__members__:
        found: enum.Enum = kind.__members__[name]
        return found
    raise CheckpointError(f"it asks {kind!r} for {name!r}, which is no member of an enumeration")


class CheckpointReader(FileSystemReader):
    """A ``FileSystemReader`` that runs nothing. See [Note: pickles in checkpoints]."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Look at the metadata at once, so that what is wrong is an error here.

        Args:
            path: the checkpoint's directory.

        Raises:
            CheckpointError: saying what is wrong with it.
        """
        super().__init__(path)
        self.read_metadata()

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As always, but see [Note: pickles in checkpoints].

        Raises:
            CheckpointError: naming what the metadata wants to call.
        """
        rank = kwargs.get("rank")
        name = ".metadata" if rank is None else f"__{rank}.metadata"
        found = _metadata(pathlib.Path(self.path, name))
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def _metadata(path: pathlib.Path) -> Metadata:
    try:
        found = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        if not isinstance(found, Metadata):
            raise CheckpointError(f"it holds a {type(found).__name__}")
        _check_places(found)
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(
            f"'{path}' cannot be trusted as a checkpoint's metadata: {_said(error)}. Nothing of it "
            "was run. Load checkpoints that you or your own jobs have written."
        ) from error
    return found


def _check_places(metadata: Metadata) -> None:
    """Refuse tensors whose place is not in the checkpoint."""
    places = metadata.storage_data
    if not isinstance(places, dict) or not isinstance(metadata.state_dict_metadata, dict):
        raise CheckpointError("it does not say where tensors are")
    for place in places.values():
        relative = pathlib.PurePath(place.relative_path)
        if relative.is_absolute() or ".." in relative.parts:
            raise CheckpointError(f"it refers to '{relative}', outside of the checkpoint")


def files_in(metadata: Metadata) -> frozenset[str]:
    """The files that a checkpoint's metadata says tensors and values are in."""
    return frozenset(str(place.relative_path) for place in (metadata.storage_data or {}).values())


def _said(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


class CheckpointPlanner(DefaultLoadPlanner):
    """A ``DefaultLoadPlanner`` that runs nothing. See [Note: pickles in checkpoints]."""

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take a value that is no tensor: numbers, texts and containers of them.

        Raises:
            CheckpointError: for anything that ``torch.load(weights_only=True)`` does not admit.
        """
        try:
            plain = torch.load(value, weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"'{read_item.storage_index.fqn}' of the checkpoint is not plain data and was not "
                f"loaded: {_said(error)}"
            ) from error
        ours = io.BytesIO()
        torch.save(plain, ours)
        ours.seek(0)
        super().load_bytes(read_item, ours)
