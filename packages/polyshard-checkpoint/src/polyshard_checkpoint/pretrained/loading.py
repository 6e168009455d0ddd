"""A model's folder into its shards; what does not fit is an error before anything is read."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polyshard._torch.staged import checkpoint_name
from polyshard.errors import CheckpointError
from polyshard_checkpoint.pretrained import library
from polyshard_checkpoint.safetensors.header import Stored
from polyshard_checkpoint.safetensors.model import (
    give_memory,
    read_weights,
    shared_names,
    weights_of,
)
from polyshard_checkpoint.safetensors.origin import Traced
from polyshard_checkpoint.safetensors.reading import SafetensorsReader, weight_files
from polyshard_checkpoint.together import Ranks


@dataclass(frozen=True)
class _Plan:
    """What is to be filled, with what."""

    target: nn.Module
    made: Mapping[str, Traced]
    reader: SafetensorsReader
    used: list[Any] | None


def load_pretrained(
    model: nn.Module, folder: str | os.PathLike[str], *, ignore: Collection[str] = ()
) -> None:
    """Fill a sharded model from a folder that ``from_pretrained`` would take; collective.

    Each rank reads the bytes of its own shards, straight to where these rest, converted to their
    dtype on the way. A model on the meta device gets memory for its shards here, and the buffers
    that it computes from its config (rotary frequencies) their values. Weights that files hold in
    another form than the model (experts apart, which it stacks) are converted by transformers' own
    mappings, by elements and not by tensors. A tied tensor is read once.

    Args:
        model: of transformers, sharded or not, or any other whose files have its names. One of peft
            gets its adapter from a folder with ``adapter_config.json``, and from another the
            weights of its base model.
        folder: with ``model.safetensors``, or files and their index; or one file.
        ignore: patterns (as of ``fnmatch``) of names that need not fit: of tensors of the model
            that keep the values they have, of tensors in the files that are not read.

    Raises:
        CheckpointError: on every rank alike, with all names that the files lack, that the model
            lacks, and whose shapes differ; nothing is changed then.
        UnsupportedError: when transformers is too old.
    """
    model = library.uncompiled(model)
    doing = f"Loading '{folder}'"
    with Ranks() as ranks:
        plan = ranks.agreed(doing, lambda: _plan(model, Path(folder), ignore))
        lost = ranks.agreed(doing, lambda: _take_memory(plan))
        ranks.agreed(doing, lambda: _compute(plan, lost))
        ranks.agreed(doing, lambda: read_weights(plan.target, plan.made, plan.reader, ranks))
    if plan.used is not None:
        target: Any = plan.target
        target._weight_conversions = plan.used


def _plan(model: nn.Module, folder: Path, ignore: Collection[str]) -> _Plan:
    is_adapter = (folder / library.ADAPTER_CONFIG).is_file()
    stem = library.ADAPTER if is_adapter else library.MODEL
    if not folder.exists():
        raise CheckpointError(
            f"there is no '{folder}'. Of a repository, give the folder that it was downloaded to "
            "(huggingface_hub.snapshot_download returns it)."
        )
    reader = SafetensorsReader(folder, weight_files(folder, stem))
    target: Any = model
    if library.is_peft(model) and not is_adapter:
        target = target.get_base_model()
    weights = weights_of(target)
    if library.is_peft(target):
        aliases, found = _of_adapter(target, weights, reader.stored)
    else:
        aliases = library.named_as_in_files(target, list(weights))
        if library.is_transformers(target):
            found = library.converted(target, dict.fromkeys(aliases, 0), reader.stored)
        else:
            found = _by_name(aliases, reader.stored)
    made = _unfit(target, weights, aliases, found, ignore)
    return _Plan(target, made, reader, found.used)


def _by_name(names: Iterable[str], stored: Mapping[str, Stored]) -> library.Converted:
    found = library.Converted()
    for name in names:
        if name in stored:
            found.made[name] = Traced.stored(name, stored[name].shape, stored[name].dtype)
    found.unexpected = sorted(stored.keys() - found.made.keys())
    return found


def _of_adapter(
    model: nn.Module, weights: Mapping[str, Tensor], stored: Mapping[str, Stored]
) -> tuple[dict[str, list[str]], library.Converted]:
    """Names in an adapter's files, of what of the model, and what is made of them."""
    (adapter, *others) = library.adapter_names(model)
    if others:
        adapter = str(getattr(model, "active_adapter", adapter))
    traced = {n: Traced.stored(n, v.shape, v.dtype) for n, v in weights.items()}
    called = library.in_adapter_files(model, adapter, traced)
    aliases = {name: [tensor.pieces[0].name] for name, tensor in called.items() if tensor.pieces}
    return aliases, _by_name(aliases, stored)


def _unfit(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    aliases: Mapping[str, list[str]],
    found: library.Converted,
    ignore: Collection[str],
) -> dict[str, Traced]:
    """What to fill, by the model's names.

    Raises:
        CheckpointError: with all that does not fit.
    """
    made: dict[str, Traced] = {}
    misshapen = []
    for name, tensor in found.made.items():
        for own in aliases[name]:
            value = weights[own]
            if problem := _problem(value, tensor):
                if value.is_meta or not _is_ignored(name, ignore):
                    misshapen.append(f"'{name}' {problem}")
            else:
                made[own] = tensor
    shared = shared_names(model)
    for names in shared:
        for other in [n for n in library.preferred(model, names) if n in made][1:]:
            del made[other]
    same = {n for names in shared if any(n in made for n in names) for n in names}
    absent = {n for n, own in aliases.items() if n not in found.made and not same.issuperset(own)}
    fine = library.may_be_missing(model, absent) | {n for n in absent if _is_ignored(n, ignore)}
    missing = sorted(
        n for n in absent if n not in fine or _would_have_none(model, weights, aliases[n])
    )
    unexpected = [name for name in found.unexpected if not _is_ignored(name, ignore)]
    said = [
        f"{len(names)} {what}: {', '.join(names)}"
        for what, names in (
            ("tensors of the model are not in the files", missing),
            ("tensors in the files are not in the model", unexpected),
            ("tensors differ in shape or kind", sorted(misshapen)),
            ("tensors cannot be converted", found.impossible),
        )
        if names
    ]
    if said:
        raise CheckpointError(
            f"the files do not fit this {library.class_name(model)}. {'; '.join(said)}. Is it the "
            "folder of this model, and of this config? ignore= takes patterns of names that may "
            "differ; such tensors must have values before loading."
        )
    return made


def _problem(value: Tensor, made: Traced) -> str:
    if value.shape != made.shape:
        return f"is {tuple(made.shape)} in the files and {tuple(value.shape)} in the model"
    if made.dtype.is_floating_point != value.dtype.is_floating_point:
        return f"is {made.dtype} in the files and {value.dtype} in the model"
    return ""


def _is_ignored(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _would_have_none(model: nn.Module, weights: Mapping[str, Tensor], names: Iterable[str]) -> bool:
    """Whether some of these would be without values: buffers of transformers' are computed."""
    vacant = [name for name in names if weights[name].is_meta]
    if not (vacant and library.is_transformers(model)):
        return bool(vacant)
    buffers = {checkpoint_name(model, name) for name, _ in model.named_buffers()}
    return not buffers.issuperset(vacant)


def _take_memory(plan: _Plan) -> dict[str, Tensor]:
    """Give shards memory; buffers that have no values in files, by name."""
    lost: list[str] = []
    if library.is_transformers(plan.target):
        vacant = [name for name, buffer in plan.target.named_buffers() if buffer.is_meta]
        lost = [n for n in vacant if checkpoint_name(plan.target, n) not in plan.made]
    named = {checkpoint_name(plan.target, name) for name in lost}
    give_memory(plan.target, {*plan.made, *named})
    return {name: plan.target.get_buffer(name) for name in lost}


def _compute(plan: _Plan, lost: Mapping[str, Tensor]) -> None:
    if lost and (left := library.compute_buffers(plan.target, lost)):
        raise CheckpointError(
            f"{library.class_name(plan.target)}._init_weights gives these buffers no values, and "
            f"no file holds them: {', '.join(left)}. Make them outside of torch.device('meta')."
        )
