"""A sharded model to and from a folder of safetensors files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from polyshard._torch.staged import checkpoint_name
from polyshard.checkpoint.together import Ranks
from polyshard.errors import CheckpointError, SettingError
from polyshard.safetensors.reading import SafetensorsReader
from polyshard.safetensors.writing import SafetensorsWriter

FILE_BYTES = 5_000_000_000
"""The size that Hugging Face's libraries split files at."""


def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Save weights as ``transformers`` and others load them; collective, without gathering any.

    Every rank writes its own shards into files that all ranks see. Tensors under several names are
    saved under the first, as those libraries do. The rest of such a folder (``config.json``, the
    tokenizer) is the caller's to save.

    Args:
        model: sharded or not.
        folder: where to; made if it is not there.
        dtype: what floating-point tensors are converted to; their own by default. Takes memory for
            a converted copy of this rank's shards.
        file_bytes: how large a file may be, unless it holds a single tensor.

    Raises:
        CheckpointError: on every rank alike, when it failed on any, or the folder holds such files.
        SettingError: when ``file_bytes`` is not positive.
    """
    if file_bytes < 1:
        raise SettingError(f"file_bytes={file_bytes}: a file holds at least one byte.")
    doing = f"Saving '{folder}'"
    state = _tensors(model)
    for names in _shared_names(model):
        for name in names[1:]:
            state.pop(name, None)
    if dtype is not None:
        state = {n: v.to(dtype) if v.is_floating_point() else v for n, v in state.items()}
    with Ranks() as ranks:
        writer = ranks.agreed(doing, lambda: SafetensorsWriter(folder, file_bytes))
        try:
            ranks.agreed(doing, lambda: _save(state, writer, ranks))
        except BaseException:
            if ranks.leads:
                writer.remove_unfinished()
            raise


def load_safetensors(model: nn.Module, folder: str | os.PathLike[str]) -> frozenset[str]:
    """Fill a model, however it is sharded, from safetensors files; collective.

    Each rank reads its own shards. A name that the files lack is fine if it belongs to a tensor
    that has another name which they have.

    Args:
        model: sharded or not, and on real memory: after ``to_empty`` if it was on meta.
        folder: with ``*.safetensors`` files; all of them are looked at.

    Returns:
        Names in the files that the model has no use for.

    Raises:
        CheckpointError: on every rank alike, when the files lack tensors or hold other shapes.
    """
    doing = f"Loading '{folder}'"
    state = _tensors(model)
    with Ranks() as ranks:
        reader = ranks.agreed(doing, lambda: SafetensorsReader(folder))
        ranks.agreed(doing, lambda: _drop_missing(state, model, reader))
        ranks.agreed(doing, lambda: _load(model, state, reader, ranks))
    return reader.names - state.keys()


def _drop_missing(state: dict[str, Tensor], model: nn.Module, reader: SafetensorsReader) -> None:
    """Leave out names that the files lack, which is fine if they have another name of the tensor.

    Raises:
        CheckpointError: when they do not.
    """
    missing = sorted(state.keys() - reader.names)
    known = {n for names in _shared_names(model) if reader.names & set(names) for n in names}
    lacking = [name for name in missing if name not in known]
    if lacking:
        raise CheckpointError(
            f"the files lack {len(lacking)} tensors of the model: {', '.join(lacking[:5])}"
            f"{' and others' if len(lacking) > 5 else ''}. Is it a checkpoint of this model?"
        )
    for name in missing:
        del state[name]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    found: Mapping[str, Any] = get_model_state_dict(model)
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _shared_names(model: nn.Module) -> list[list[str]]:
    """The names, as in state dicts, of each parameter and buffer that has several."""
    found: dict[int, list[str]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            found.setdefault(id(tensor), []).append(checkpoint_name(model, name))
    return [names for names in found.values() if len(names) > 1]


def _save(state: dict[str, Tensor], writer: SafetensorsWriter, ranks: Ranks) -> None:
    dcp.save(state, storage_writer=writer, process_group=ranks.group, no_dist=ranks.alone)


def _load(
    model: nn.Module, state: dict[str, Tensor], reader: SafetensorsReader, ranks: Ranks
) -> None:
    dcp.load(state, storage_reader=reader, process_group=ranks.group, no_dist=ranks.alone)
    options = dcp.state_dict.StateDictOptions(strict=False)
    values: dict[str, Any] = {**state}
    set_model_state_dict(model, values, options=options)
