"""What transformers and peft know of a model: classes, files' names, conversions of weights.

Their code is asked, and none of it is repeated here, so that folders stay what they say they are.
It is imported when a model of theirs is given: nothing here depends on them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from polyshard.errors import UnsupportedError
from polyshard.module import FSDPModule
from polyshard_checkpoint.safetensors.header import Stored
from polyshard_checkpoint.safetensors.origin import Traced

MODEL, ADAPTER = "model", "adapter_model"
"""Stems of files."""
ADAPTER_CONFIG = "adapter_config.json"


@dataclass
class Converted:
    """What files mean for a model.

    Attributes:
        made: tensors of the model, by name, of what is in the files.
        unexpected: names in the files that the model has no use for.
        impossible: what cannot be converted, one sentence each.
        used: transformers' conversions, for a save to revert.
    """

    made: dict[str, Traced] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    impossible: list[str] = field(default_factory=list)
    used: list[Any] | None = None


def uncompiled(model: nn.Module) -> nn.Module:
    """The model that ``torch.compile`` was given."""
    found: nn.Module = getattr(model, "_orig_mod", model)
    return found


def class_name(model: nn.Module) -> str:
    """What its class was called before it was sharded."""
    with original_classes(model):
        return type(model).__name__


def is_transformers(model: nn.Module) -> bool:
    """Whether it is a model of transformers, sharded or not."""
    return _derives(model, "transformers.modeling_utils", "PreTrainedModel")


def is_peft(model: nn.Module) -> bool:
    """Whether it is a model of peft, with adapters around another model."""
    return _derives(model, "peft.peft_model", "PeftModel")


def _derives(model: nn.Module, home: str, name: str) -> bool:
    return any((kind.__module__, kind.__name__) == (home, name) for kind in type(model).__mro__)


@contextmanager
def original_classes(model: nn.Module) -> Iterator[None]:
    """Have sharded modules be of the classes they were: libraries look names of classes up."""
    kinds = {m: type(m) for m in model.modules() if isinstance(m, FSDPModule)}
    try:
        for module, kind in kinds.items():
            module.__class__ = kind.__mro__[FSDPModule._orig_cls_mro_index]
        yield
    finally:
        for module, kind in kinds.items():
            module.__class__ = kind


def _conversions() -> Any:
    try:
        return (
            importlib.import_module("transformers.core_model_loading"),
            importlib.import_module("transformers.conversion_mapping"),
        )
    except ImportError as error:
        raise UnsupportedError(
            "load_pretrained and save_pretrained convert weights by transformers' own mappings, "
            f"which this transformers does not have ({error}). Install transformers 5.23 or newer."
        ) from error


# Reading -----------------------------------------------------------------------------------------


def named_as_in_files(model: nn.Module, names: Sequence[str]) -> dict[str, list[str]]:
    """Tensors of a base model by the names they have without adapters; adapters' own are left out.

    Modules that peft trains instead of copies have the values of what they were copied from.
    """
    found: dict[str, list[str]] = {}
    parts = _adapter_parts(model)
    for name in names:
        pieces = name.split(".")
        if parts.intersection(pieces):
            continue
        if "modules_to_save" in pieces:
            place = pieces.index("modules_to_save")
            del pieces[place : place + 2]  # and the adapter's name
        plain = [piece for piece in pieces if piece not in ("base_layer", "original_module")]
        found.setdefault(".".join(plain), []).append(name)
    return found


def _adapter_parts(model: nn.Module) -> set[str]:
    """Names of modules and parameters that adapters have put beside what they adapt."""
    found: set[str] = set()
    for module in model.modules():
        for name in ("adapter_layer_names", "other_param_names"):
            found |= set(getattr(module, name, ()))
    return found - {"base_layer", "modules_to_save"}  # these have names of the base


def converted(model: Any, names: Mapping[str, Any], stored: Mapping[str, Stored]) -> Converted:
    """What a folder of transformers' means for ``model``, by transformers' own conversions.

    Args:
        model: of transformers.
        names: of its tensors.
        stored: what the files hold.
    """
    loading, mappings = _conversions()
    found = Converted()
    with original_classes(model):
        transforms = mappings.get_model_conversion_mapping(model)
        renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        collected: dict[str, Any] = {}
        unexpected: dict[str, str] = {}
        for file_name in sorted(stored, key=loading.dot_natural_key):
            name, pattern = _renamed(loading, model, file_name, renamings, converters, names)
            if name not in names or (pattern is None and name in found.made):
                unexpected[name] = file_name
                continue
            given = stored[file_name]
            leaf = Traced.stored(file_name, given.shape, given.dtype)
            if pattern is None:
                found.made[name] = leaf
            else:
                each = collected.setdefault(name, deepcopy(by_pattern[pattern]))
                each.add_tensor(name, file_name, pattern, leaf)
        for name, converter in collected.items():
            _convert(model, name, converter, found)
        left = SimpleNamespace(missing_keys=set(), unexpected_keys=set(unexpected))
        model._adjust_missing_and_unexpected_keys(left)
    found.unexpected = sorted(unexpected[name] for name in left.unexpected_keys)
    found.used = [transform for transform in transforms if transform.was_used()]
    return found


def _renamed(
    loading: Any,
    model: Any,
    file_name: str,
    renamings: list[Any],
    converters: list[Any],
    names: Mapping[str, Any],
) -> tuple[str, str | None]:
    prefix = model.base_model_prefix
    found: tuple[str, str | None] = loading.rename_source_key(
        file_name, renamings, converters, prefix, names
    )
    if found[0] not in names and file_name in names:  # was the model's own name already
        found = loading.rename_source_key(file_name, [], [], prefix, names)
    return found


@torch.no_grad()
def _convert(model: Any, name: str, converter: Any, found: Converted) -> None:
    try:
        results = converter.convert(name, model=model, config=model.config)
        for target, value in results.items():
            found.made[target] = value[0] if isinstance(value, list) else value
    except Exception as error:  # whatever shapes that do not fit raise
        found.impossible.append(f"'{name}' cannot be made ({type(error).__name__}: {error})")


def may_be_missing(model: nn.Module, names: set[str]) -> set[str]:
    """Those of ``names`` that transformers does not mind to miss in files."""
    if not is_transformers(model):
        return set()
    left = SimpleNamespace(missing_keys=set(names), unexpected_keys=set())
    checked: Any = model
    checked._adjust_missing_and_unexpected_keys(left)
    still: set[str] = left.missing_keys
    return names - still


def preferred(model: nn.Module, shared: Sequence[str]) -> list[str]:
    """Names of one tensor, those first that transformers saves it under."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return sorted(shared, key=lambda name: name in tied)


@torch.no_grad()
def compute_buffers(model: Any, lost: Mapping[str, Tensor]) -> list[str]:
    """Have ``model`` compute buffers that have memory but no values; the names of those it did not.

    Args:
        model: of transformers, which computes them where it initialises weights.
        lost: the buffers, by name. Everything else stays as it is.
    """
    initialization = importlib.import_module("transformers.initialization")
    for tensor in lost.values():
        tensor.fill_(_unlikely(tensor))
    kept = [
        t for t in (*model.parameters(), *model.buffers()) if all(t is not b for b in lost.values())
    ]
    try:
        for tensor in kept:
            tensor._is_hf_initialized = True
        with original_classes(model), initialization.guard_torch_init_functions():
            for path in dict.fromkeys(name.rpartition(".")[0] for name in lost):
                _owner(model, path)._init_weights(model.get_submodule(path))
    finally:
        for tensor in kept:
            del tensor._is_hf_initialized
    return [n for n, t in lost.items() if t.numel() and bool(_is_unlikely(t).all())]


def _unlikely(tensor: Tensor) -> float | int | bool:
    if tensor.dtype == torch.bool:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return float("nan")
    return torch.iinfo(tensor.dtype).max


def _is_unlikely(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool:
        return torch.zeros(1, dtype=torch.bool, device="cpu")  # cannot be told
    has_nan = tensor.is_floating_point() or tensor.is_complex()
    return tensor.isnan() if has_nan else tensor == _unlikely(tensor)


def _owner(model: Any, path: str) -> Any:
    """The model of transformers that a module belongs to: the nearest above it."""
    owner = model
    names = path.split(".") if path else []
    for depth in range(1, len(names) + 1):
        module = model.get_submodule(".".join(names[:depth]))
        owner = module if is_transformers(module) else owner
    return owner


# Writing -----------------------------------------------------------------------------------------


def file_groups(tensors: Mapping[str, Traced], most: int | str) -> list[list[str]]:
    """Names that share a file, as Hugging Face's libraries split models."""
    hub = importlib.import_module("huggingface_hub")
    split = hub.split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.like.untyped_storage().nbytes(),
        get_storage_id=lambda tensor: tensor.like.untyped_storage()._cdata,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=most,
    )
    return list(split.filename_to_tensors.values())


@torch.no_grad()
def in_files(
    model: Any, state: dict[str, Traced], shared: Sequence[Sequence[str]], *, revert: bool
) -> dict[str, Traced]:
    """What transformers would save of ``model``, by the names in files and in their order.

    Args:
        model: of transformers.
        state: its tensors.
        shared: names that belong to one tensor.
        revert: whether weights get the form that they were published in.
    """
    modeling = importlib.import_module("transformers.modeling_utils")
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    stand_ins: dict[str, Tensor] = {}
    one = {name: index for index, names in enumerate(shared) for name in names}
    values: dict[int, Tensor] = {}
    for name in state:
        if name in one:
            stand_ins[name] = values.setdefault(one[name], torch.empty(1, device="cpu"))
        else:
            stand_ins[name] = torch.empty(1, device="cpu")
    kept = modeling.remove_tied_weights_from_state_dict(stand_ins, model)
    left = {name: state[name] for name in kept}
    if not revert:
        return left
    loading, _ = _conversions()
    found: dict[str, Traced] = loading.revert_weight_conversion(model, left)
    return found


def adapter_names(model: Any) -> list[str]:
    """Of all adapters of a model of peft."""
    return list(model.peft_config)


def in_adapter_files(model: Any, adapter: str, state: dict[str, Traced]) -> dict[str, Traced]:
    """What peft would save of one adapter."""
    peft = importlib.import_module("peft")
    found: dict[str, Traced] = peft.get_peft_model_state_dict(
        model, state_dict=dict(state), adapter_name=adapter
    )
    return found


def write_rest(model: Any, folder: str) -> None:
    """Have the library write to ``folder`` all that it saves of a model, with weights of no use."""
    if is_peft(model):
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        names += [name for name, _ in model.named_buffers(remove_duplicate=False)]
        model.save_pretrained(
            folder, state_dict={name: torch.empty(1, device="cpu") for name in names}
        )
    else:
        model.save_pretrained(folder, state_dict={})
