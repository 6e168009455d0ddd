"""Configs of ``transformers``, which need not be installed."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from polyshard_cli.needs import missing
from polyshard_cli.plan.errors import PlanError

FILE = "config.json"


def config_of(name: str, overrides: Mapping[str, object]) -> Any:
    """The config in a directory, or of a class, with some fields changed.

    Raises:
        PlanError: without transformers, for unknown classes and fields, and for directories
            without a config.
    """
    if need := missing("plan", [name]):
        raise PlanError(need)
    config = _from_directory(Path(name)) if Path(name).is_dir() else _from_class(name)
    known = config.to_dict()
    for field, value in overrides.items():
        if field not in known and not hasattr(config, field):
            close = difflib.get_close_matches(field, known, n=1)
            hint = f"; did you mean {close[0]}={value}?" if close else ""
            raise PlanError(f"--set {field}={value}: {name} has no field {field!r}{hint}")
    if not overrides:
        return config
    # Made anew, because classes work out fields from others.
    plain = {key: value for key, value in known.items() if key not in _derived(config, overrides)}
    return type(config)(**{**plain, **overrides})


def _derived(config: Any, overrides: Mapping[str, object]) -> set[str]:
    """Fields that follow from those changed, unless they are changed themselves."""
    defaults = {"transformers_version", "model_type"}
    if {"hidden_size", "num_attention_heads"} & set(overrides) and "head_dim" not in overrides:
        heads = getattr(config, "num_attention_heads", 0) or 1
        if getattr(config, "head_dim", None) == getattr(config, "hidden_size", 0) // heads:
            defaults.add("head_dim")
    return defaults


def _from_directory(path: Path) -> Any:
    if not (path / FILE).is_file():
        raise PlanError(
            f"MODEL {path}: no {FILE} in this directory; give one that save_pretrained() wrote"
        )
    try:
        return import_module("transformers").AutoConfig.from_pretrained(str(path))
    except (ValueError, OSError, KeyError, json.JSONDecodeError) as error:
        first = str(error).splitlines()[0]
        raise PlanError(f"MODEL {path}: transformers cannot read its {FILE}: {first}") from error


def _from_class(name: str) -> Any:
    made = getattr(import_module("transformers"), name, None)
    if made is None:
        near = nearest_config(name)
        hint = f"; did you mean {near}?" if near else ""
        raise PlanError(f"MODEL {name}: transformers has no such class{hint}")
    return made()


def nearest_config(name: str) -> str:
    """The config class whose name is nearest; empty where none is, or without transformers."""
    if find_spec("transformers") is None:
        return ""
    known = [found for found in dir(import_module("transformers")) if found.endswith("Config")]
    lower = {found.lower(): found for found in known}
    wanted = name.lower() if name.lower().endswith("config") else f"{name.lower()}config"
    close = difflib.get_close_matches(wanted, lower, n=1)
    return lower[close[0]] if close else ""


def model_of(config: Any) -> nn.Module:
    """A causal language model of ``config``; the base model where there is none.

    Raises:
        PlanError: for a config that no model is for.
    """
    transformers = import_module("transformers")
    config.use_cache = False
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            model: nn.Module = auto.from_config(config)
            return model
    raise PlanError(
        f"MODEL {type(config).__name__}: transformers has no model of this config; LlamaConfig "
        "works"
    )
