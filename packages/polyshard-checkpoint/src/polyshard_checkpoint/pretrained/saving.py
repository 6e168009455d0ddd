"""A sharded model as the folder that its library would save, byte for byte."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyshard.errors import SettingError
from polyshard.files import replace_file
from polyshard_checkpoint.pretrained import library
from polyshard_checkpoint.safetensors.model import shared_names, weights_of, write_weights
from polyshard_checkpoint.safetensors.origin import Traced
from polyshard_checkpoint.safetensors.writing import Arrangement, SafetensorsWriter
from polyshard_checkpoint.together import Ranks

ANY_BYTES = 1
"""Of a file: an arrangement says what is in each."""


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "50GB",
    dtype: torch.dtype | None = None,
    save_original_format: bool = True,
) -> None:
    """Save a model as its own ``save_pretrained`` does from one process; collective.

    Every rank writes the bytes of its own shards to their places in files that all ranks see: no
    tensor is gathered. Weights files have the same bytes as those that the library writes; config,
    generation config, an adapter's config and model card are written by the library itself. Old
    weights in the folder are replaced.

    Args:
        model: of transformers or peft (its adapters are saved), sharded or not.
        folder: where to; made if it is not there.
        max_shard_size: of a file, in bytes or as text (``"5GB"``), unless it holds a single tensor.
        dtype: what floating-point tensors are converted to, block by block; their own by default.
        save_original_format: whether weights get the form in which they were published, by
            transformers' conversions.

    Raises:
        CheckpointError: on every rank alike, when it failed on any; old weights are still there
            unless it failed while files got their names.
        SettingError: for other models.
        UnsupportedError: when transformers is too old.
    """
    model = library.uncompiled(model)
    if not (library.is_peft(model) or library.is_transformers(model)):
        raise SettingError(
            f"save_pretrained saves models of transformers and peft, not {type(model).__name__}. "
            "polyshard_checkpoint.safetensors.save_safetensors saves any."
        )
    path = Path(folder)
    doing = f"Saving '{folder}'"
    with Ranks() as ranks:
        weights = ranks.agreed(doing, lambda: weights_of(model))
        planned = ranks.agreed(
            doing,
            lambda: _planned(model, weights, path, dtype, max_shard_size, save_original_format),
        )
        ranks.led(doing, lambda: _write_rest(model, path, dtype))
        for where, stem, arrangement in planned:
            writer = SafetensorsWriter(where, ANY_BYTES, stem, arrangement=arrangement)
            used = {p.name for tensor in arrangement.tensors.values() for p in tensor.pieces}
            write_weights(doing, {n: v for n, v in weights.items() if n in used}, writer, ranks)


def _planned(
    model: Any,
    weights: dict[str, Tensor],
    path: Path,
    dtype: torch.dtype | None,
    most: int | str,
    revert: bool,
) -> list[tuple[Path, str, Arrangement]]:
    """For each set of files: their folder, what they are called and hold."""
    state = {n: Traced.stored(n, v.shape, _dtype(v, dtype)) for n, v in weights.items()}
    with library.original_classes(model):
        if not library.is_peft(model):
            found = library.in_files(model, state, shared_names(model), revert=revert)
            about = {"total_parameters": model.num_parameters()}
            groups = library.file_groups(found, most)
            return [(path, library.MODEL, Arrangement(groups, found, about))]
        planned = []
        for name in library.adapter_names(model):
            found = library.in_adapter_files(model, name, state)
            where = path if name == "default" else path / name
            planned.append((where, library.ADAPTER, Arrangement([list(found)], found)))
        return planned


def _dtype(value: Tensor, asked: torch.dtype | None) -> torch.dtype:
    return asked if asked is not None and value.is_floating_point() else value.dtype


def _write_rest(model: Any, path: Path, dtype: torch.dtype | None) -> None:
    """Everything but weights, as the library has it."""
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path, prefix=".unfinished-") as name:
        with library.original_classes(model):
            library.write_rest(model, name)
        made = Path(name)
        if dtype is not None and (config := made / "config.json").is_file():
            said = json.loads(config.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
            replace_file(config, (json.dumps(said, indent=2, sort_keys=True) + "\n").encode())
        for file in [file for file in made.rglob("*") if file.is_file()]:
            if file.suffix != ".safetensors":
                final = path / file.relative_to(made)
                final.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(file, final)
