"""A sharded model to and from a folder of safetensors files."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from polyshard._torch.private import local_tensor
from polyshard._torch.staged import checkpoint_name
from polyshard.engine.root import units_below
from polyshard.errors import CheckpointError, SettingError
from polyshard_checkpoint.safetensors.origin import Traced
from polyshard_checkpoint.safetensors.reading import SafetensorsReader
from polyshard_checkpoint.safetensors.writing import SafetensorsWriter
from polyshard_checkpoint.together import Ranks


def give_memory(model: nn.Module, filled: Collection[str]) -> None:
    """Have what is on the meta device rest in memory of this rank, with any values.

    Args:
        model: sharded or not.
        filled: names, as in state dicts, of what will get values.

    Raises:
        CheckpointError: when something on the meta device is not among them; nothing is changed.
    """
    vacant = {id(tensor): tensor for _, tensor in _named(model) if tensor.is_meta}
    if not vacant:
        return
    safe = {id(t) for name, t in _named(model) if checkpoint_name(model, name) in filled}
    left = [name for name, t in _named(model) if id(t) in vacant.keys() - safe]
    if left:
        raise CheckpointError(
            f"the model is on the meta device, and nothing would give values to {len(left)} of its "
            f"tensors, which no file holds: {', '.join(left[:5])}"
            f"{' and others' if len(left) > 5 else ''}. Compute them before it is loaded: make "
            "buffers outside of torch.device('meta'), or call model.to_empty(device=...) and "
            "initialise all of them."
        )
    device = _device(model)
    for _, _, unit in units_below(model):
        unit.reshard()
        for group in unit.groups:
            group.take_memory(torch.device(device))
    held = _held(model)
    model._apply(lambda tensor: _with_memory(tensor, device))
    # Outside of sharded modules that has made a parameter of its own of every name.
    for (first, key), *others in held:
        for registered, name in others:
            registered[name] = first[key]


def _held(model: nn.Module) -> list[list[tuple[dict[str, Any], str]]]:
    """Where modules hold each tensor that is on the meta device."""
    found: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for registered in (module._parameters, module._buffers):
            for name, tensor in registered.items():
                if tensor is not None and tensor.is_meta:
                    found.setdefault(id(tensor), []).append((registered, name))
    return list(found.values())


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _device(model: nn.Module) -> str:
    """Where shards of ``model`` are, which is where its buffers are needed."""
    kinds = (t.device_mesh.device_type for _, t in _named(model) if isinstance(t, DTensor))
    return next(kinds, "cpu")


def _with_memory(tensor: Tensor, device: str) -> Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor


FILE_BYTES = 5_000_000_000
"""The size that Hugging Face's libraries split files at."""

Names = Callable[[str], "str | None"]
"""What files call a tensor of the model; ``None`` if it is in none of them."""


def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
    names: Names | None = None,
    stem: str = "model",
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
        names: what each tensor is called in the files, and which are left out (``None``), alike on
            all ranks; by default all of them, by their own names.
        stem: what the files are called: ``model.safetensors``, ``model-00001-of-00002``, ...

    Raises:
        CheckpointError: on every rank alike, when it failed on any, or the folder holds such files.
        SettingError: when ``file_bytes`` is not positive, ``stem`` is no file's name, or ``names``
            gives two tensors one name, or leaves none.
    """
    if file_bytes < 1:
        raise SettingError(f"file_bytes={file_bytes}: a file holds at least one byte.")
    if not stem or os.path.basename(stem) != stem:
        raise SettingError(f"stem={stem!r}: files are called by it, in the folder that is given.")
    doing = f"Saving '{folder}'"
    with Ranks() as ranks:
        called = ranks.agreed(doing, lambda: _called(model, names))
        for shared in shared_names(model):
            for name in [name for name in shared if name in called][1:]:
                del called[name]
        _check_called(called, names)
        state = ranks.agreed(doing, lambda: _converted(_tensors(model, called), dtype))
        writer = ranks.agreed(doing, lambda: SafetensorsWriter(folder, file_bytes, stem))
        write_weights(doing, state, writer, ranks)


def load_safetensors(
    model: nn.Module, folder: str | os.PathLike[str], *, names: Names | None = None
) -> frozenset[str]:
    """Fill a model, sharded in any way, from safetensors files; every rank calls it.

    Each rank reads its own shards. The files need only one of the names of a tied tensor.

    A model on the meta device gets its memory here: each rank that of its shards, on the device of
    the mesh. Tensors that are not in the files must already have values.

    Args:
        model: sharded or not.
        folder: with ``*.safetensors`` files; all of them are read.
        names: gives the name of each tensor in the files, or ``None`` for one that they do not
            have, equally on all ranks. By default, tensors have their own names.

    Returns:
        Names in the files that the model does not use.

    Raises:
        CheckpointError: on every rank, if the files lack tensors or have other shapes.
        SettingError: if ``names`` leaves no tensor.
    """
    doing = f"Loading '{folder}'"
    with Ranks() as ranks:
        called = ranks.agreed(doing, lambda: _called(model, names))
        if names is not None and not called:
            raise SettingError("names= leaves no tensor: it gave None for each of the model's.")
        reader = ranks.agreed(doing, lambda: SafetensorsReader(folder))
        ranks.agreed(doing, lambda: _drop_missing(called, model, reader))
        stored = reader.stored
        made = {
            name: Traced.stored(file_name, stored[file_name].shape, stored[file_name].dtype)
            for name, file_name in called.items()
        }
        ranks.agreed(doing, lambda: give_memory(model, called))
        ranks.agreed(doing, lambda: read_weights(model, made, reader, ranks))
    return reader.names - set(called.values())


def _called(model: nn.Module, names: Names | None) -> dict[str, str]:
    """What the files call each tensor that is in them, by its own name."""
    every = {name: name if names is None else names(name) for name in weights_of(model)}
    return {name: called for name, called in every.items() if called is not None}


def _check_called(called: Mapping[str, str], names: Names | None) -> None:
    if names is None:
        return
    if not called:
        raise SettingError("names= leaves nothing to save: it gave None for each tensor.")
    taken: dict[str, str] = {}
    for name, file_name in called.items():
        if file_name in taken:
            raise SettingError(
                f"names= gives '{taken[file_name]}' and '{name}' one name, '{file_name}'. Give "
                "each tensor a name of its own, or None to leave it out."
            )
        taken[file_name] = name


def _drop_missing(called: dict[str, str], model: nn.Module, reader: SafetensorsReader) -> None:
    """Leave out names that the files lack, which is fine if they have another name of the tensor.

    Raises:
        CheckpointError: when they do not.
    """
    missing = sorted(name for name, file_name in called.items() if file_name not in reader.names)
    known = {
        name
        for shared in shared_names(model)
        if any(called.get(name) in reader.names for name in shared)
        for name in shared
    }
    lacking = [called[name] for name in missing if name not in known]
    if lacking:
        raise CheckpointError(
            f"the files lack {len(lacking)} tensors of the model: {', '.join(lacking[:5])}"
            f"{' and others' if len(lacking) > 5 else ''}. Is it a checkpoint of this model?"
        )
    for name in missing:
        del called[name]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of the state dict, by the names that checkpoints have."""
    state: Mapping[str, Any] = get_model_state_dict(model)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _tensors(model: nn.Module, called: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors of the model, by their names in the files."""
    state = weights_of(model)
    return {file_name: state[name] for name, file_name in called.items()}


def _converted(state: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    if dtype is None:
        return state
    return {n: v.to(dtype) if v.is_floating_point() else v for n, v in state.items()}


def shared_names(model: nn.Module) -> list[list[str]]:
    """The names, as in state dicts, of each parameter and buffer that has several."""
    found: dict[int, list[str]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            found.setdefault(id(tensor), []).append(checkpoint_name(model, name))
    return [names for names in found.values() if len(names) > 1]


def write_weights(
    doing: str, state: Mapping[str, Tensor], writer: SafetensorsWriter, ranks: Ranks
) -> None:
    """Write ``state``, each rank what it holds; of a save that fails nothing is left.

    Raises:
        CheckpointError: on every rank alike, when it failed on any.
    """
    try:
        ranks.write(doing, writer, dict(state))
    except BaseException:
        if ranks.leads:
            writer.remove_unfinished()
        raise


def read_weights(
    model: nn.Module, made: Mapping[str, Traced], reader: SafetensorsReader, ranks: Ranks
) -> None:
    """Fill tensors of ``model``, by their names, with what is made of a reader's files."""
    reader.make(made)
    every = weights_of(model)
    state = {name: every[name] for name in made}
    dcp.load(state, storage_reader=reader, process_group=ranks.group, no_dist=ranks.alone)
    own = {checkpoint_name(model, name): tensor for name, tensor in _named(model)}
    values: dict[str, Any] = {}
    for name, value in state.items():
        if _is_same(value, own.get(name)):
            _count_write(own[name])
        else:
            values[name] = value
    if values:  # what a plugin keeps in another form
        options = dcp.state_dict.StateDictOptions(strict=False)
        set_model_state_dict(model, values, options=options)


def _count_write(tensor: Tensor) -> None:
    """Its memory was written to, which autograd does not see, nor who else looks for changes."""
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    if not local.is_inference():
        torch.autograd.graph.increment_version(local)


def _is_same(value: object, own: Tensor | None) -> bool:
    """Whether a value of a state dict is the tensor of the model itself, filled by now."""
    one, other = (t.to_local() if isinstance(t, DTensor) else t for t in (value, own))
    return isinstance(one, Tensor) and isinstance(other, Tensor) and one.is_set_to(other.detach())
