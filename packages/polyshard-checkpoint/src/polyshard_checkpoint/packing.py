"""State of any form as entries of a checkpoint: its plain part as bytes, its tensors as tensors.

``torch.distributed.checkpoint`` fills what it is given, so the loading job has to know the form of
what was saved. A scheduler or a plugin may not know it before it has loaded. So the form is saved
too, without tensors, and read first.
"""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from polyshard.errors import CheckpointError

Entries = dict[str, Any]
FORM = "form"
_TENSOR, _BYTES = "polyshard tensor", "polyshard bytes"
_NUMPY = "polyshard numpy"
"""The one key of a dict that stands for such a value; an object of a class would not be plain."""


def pack(key: str, state: object) -> Entries:
    """``state`` as entries whose names begin with ``key``. Tensors are the ones given, uncopied.

    Raises:
        CheckpointError: when something in it is neither a tensor nor plain data, which could not be
            loaded without running what the checkpoint names.
    """
    tensors: list[Tensor] = []
    content = _plain(key, state, tensors)
    entries: Entries = {f"{key}.{FORM}": content}
    return entries | {f"{key}.{index}": tensor for index, tensor in enumerate(tensors)}


def check_plain(entries: Mapping[str, Any]) -> None:
    """Refuse values beside tensors that could not be loaded without running what they name.

    Raises:
        CheckpointError: naming the first.
    """
    rest = dict(_plain_values("", entries))
    try:
        _loadable(rest)  # at once: there may be some for every parameter
    except Exception:
        for key, value in rest.items():
            _plain(key, value)


def _plain_values(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """What torch's planner saves of ``tree`` beside its tensors, by name."""
    if isinstance(tree, Mapping) or type(tree) is list:
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, value in items:
            yield from _plain_values(f"{path}.{key}" if path else str(key), value)
    elif not isinstance(tree, Tensor):
        yield path, tree


def is_packed(key: str, metadata: Metadata) -> bool:
    """Whether a checkpoint has state under ``key``."""
    return f"{key}.{FORM}" in metadata.state_dict_metadata


def room_for(key: str, metadata: Metadata) -> Entries:
    """Entries to load what was saved under ``key`` into; its tensors are made on the host."""
    entries: Entries = {f"{key}.{FORM}": b""}
    index = 0
    while (found := metadata.state_dict_metadata.get(f"{key}.{index}")) is not None:
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointError(f"'{key}.{index}' of the checkpoint is not a tensor")
        entries[f"{key}.{index}"] = torch.empty(
            found.size, dtype=found.properties.dtype, device="cpu"
        )
        index += 1
    return entries


def unpack(key: str, entries: Mapping[str, Any]) -> Any:
    """The state that :func:`pack` was given, from loaded ``entries``.

    Raises:
        CheckpointError: when they do not fit together.
    """
    try:
        plain = torch.load(io.BytesIO(entries[f"{key}.{FORM}"]), weights_only=True)
        return _with_tensors(plain, key, entries)
    except Exception as error:
        raise CheckpointError(f"the state of '{key}' cannot be read: {error}") from error


def _plain(key: str, state: object, tensors: list[Tensor] | None = None) -> bytes:
    """As :func:`_loadable`; with ``tensors`` those of ``state`` are left out and put there."""
    try:
        return _loadable(state if tensors is None else _without_tensors(state, tensors))
    except Exception as error:
        raise CheckpointError(
            f"the state of '{key}' holds something that is neither a tensor nor plain data "
            f"(numbers, texts, bytes, and containers of them): {str(error).splitlines()[0]}"
        ) from error


def _loadable(value: object) -> bytes:
    """``value`` as a file, after ``torch.load(weights_only=True)`` has admitted it."""
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    torch.load(content, weights_only=True)
    return content.getvalue()


def _without_tensors(state: Any, tensors: list[Tensor]) -> Any:
    if isinstance(state, DTensor):
        raise TypeError(
            "a DTensor, whose mesh cannot be saved: put it in the model, or save to_local() per "
            "rank"
        )
    if isinstance(state, Tensor):
        tensors.append(state.detach())
        return {_TENSOR: len(tensors) - 1}
    if isinstance(state, bytes):  # torch.load(weights_only=True) refuses empty ones
        return {_BYTES: state.decode("latin-1")}
    if isinstance(state, (np.generic, np.ndarray)) and state.dtype.kind in "biufc":
        array = np.ascontiguousarray(state).reshape(state.shape)
        form = (state.dtype.str, state.shape, array.tobytes().decode("latin-1"))
        return {_NUMPY: (*form, isinstance(state, np.generic))}
    if type(state) in (dict, OrderedDict, Counter):
        items = [(key, _without_tensors(value, tensors)) for key, value in state.items()]
        return type(state)(dict(items))
    if type(state) is list:
        return [_without_tensors(value, tensors) for value in state]
    if type(state) is tuple:
        return tuple(_without_tensors(value, tensors) for value in state)
    return state


def _with_tensors(plain: Any, key: str, entries: Mapping[str, Any]) -> Any:
    if isinstance(plain, dict):
        if set(plain) == {_TENSOR}:
            return entries[f"{key}.{plain[_TENSOR]}"]
        if set(plain) == {_BYTES}:
            return plain[_BYTES].encode("latin-1")
        if set(plain) == {_NUMPY}:
            return _numpy(*plain[_NUMPY])
        items = [(name, _with_tensors(value, key, entries)) for name, value in plain.items()]
        return type(plain)(dict(items))
    if isinstance(plain, list):
        return [_with_tensors(value, key, entries) for value in plain]
    if isinstance(plain, tuple):
        return tuple(_with_tensors(value, key, entries) for value in plain)
    return plain


def _numpy(dtype: str, shape: tuple[int, ...], content: str, scalar: bool) -> Any:
    found = np.frombuffer(content.encode("latin-1"), dtype).reshape(shape)
    return found[()] if scalar else found.copy()
