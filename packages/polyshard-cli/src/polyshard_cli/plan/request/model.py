"""What MODEL names: the demonstration, a factory to import, or a config of ``transformers``.

Models are built on the meta device: shapes without values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyshard_cli.needs import is_config, missing
from polyshard_cli.plan.errors import PlanError, nearest
from polyshard_cli.plan.request.names import imported
from polyshard_cli.plan.request.settings import Settings

FILE = "config.json"


def config_of(name: str, overrides: Mapping[str, object]) -> Any:
    """The config in a directory, or of a class, with some fields changed."""
    if need := missing("plan", [name]):
        raise PlanError(need)
    config = _found(name)
    known = config.to_dict()
    for field, value in overrides.items():
        if field not in known and not hasattr(config, field):
            close = nearest(field, known)
            hint = f"; did you mean {close}={value}?" if close else ""
            raise PlanError(f"--set {field}={value}: {name} has no field {field!r}{hint}")
    if not overrides:
        return config
    # Made anew, because classes work out fields from others.
    kind: Any = type(config)
    if not Path(name).is_dir():
        return _asked(f"MODEL {name}", lambda: kind(**overrides))
    derived = {"transformers_version", "model_type"}
    if "num_hidden_layers" in overrides:
        derived.add("layer_types")
    heads = getattr(config, "num_attention_heads", 0)
    of_a_head = getattr(config, "hidden_size", 0) // (heads or 1)
    resized = {"hidden_size", "num_attention_heads"} & set(overrides)
    if resized and getattr(config, "head_dim", None) == of_a_head:
        derived.add("head_dim")
    plain = {key: value for key, value in known.items() if key not in derived}
    if "num_attention_heads" in overrides and plain.get("num_key_value_heads") == heads:
        plain["num_key_value_heads"] = overrides["num_attention_heads"]
    return _asked(f"MODEL {name}", lambda: kind(**{**plain, **overrides}))


def _found(name: str) -> Any:
    """The config in a directory, or the one that a class makes."""
    path, transformers = Path(name), import_module("transformers")
    if not path.is_dir():
        if made := getattr(transformers, name, None):
            return _asked(f"MODEL {name}", made)
        near = nearest_config(name)
        hint = f"; did you mean {near}?" if near else ""
        raise PlanError(f"MODEL {name}: transformers has no such class{hint}")
    if not (path / FILE).is_file():
        raise PlanError(
            f"MODEL {path}: no {FILE} in this directory; give one that save_pretrained() wrote"
        )
    read = partial(transformers.AutoConfig.from_pretrained, name)
    return _asked(f"MODEL {path}: its {FILE}", read)


def _asked(what: str, make: Callable[[], Any]) -> Any:
    """What transformers returns; it refuses values by exceptions of many classes."""
    try:
        return make()
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines()[:2]]  # which check, and why
        first = " ".join(filter(None, lines)) or type(error).__name__
        raise PlanError(f"{what}: transformers makes no config of it: {first}") from error


def nearest_config(name: str) -> str:
    """The config class whose name is nearest; empty where none is, or without transformers."""
    if find_spec("transformers") is None:
        return ""
    known = [found for found in dir(import_module("transformers")) if found.endswith("Config")]
    lower = {found.lower(): found for found in known}
    wanted = name.lower() if name.lower().endswith("config") else f"{name.lower()}config"
    return lower.get(nearest(wanted, lower), "")


def model_of(config: Any) -> nn.Module:
    """A causal language model of ``config``; the base model where there is none."""
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


LONGEST = 4096
"""Tokens of a sequence where a model would take more and the request sets none."""

Inputs = Callable[[int, int], Any]
"""Of (sequences, tokens): what the model is called with, on the meta device."""


@dataclass(frozen=True)
class Loaded:
    """A model that can be built, and what its family is known to need."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    sequence: int
    tp_plan: str = ""
    """``module:function`` of a ready-made tensor-parallel plan, if there is one."""


def load_model(settings: Settings) -> Loaded:
    """What ``settings.model`` names; nothing is built yet."""
    name = settings.model
    if name == "demo" or name.startswith("demo:"):
        loaded = _demo(name)
    elif is_config(name):
        loaded = _transformers(name, settings)
    elif ":" in name:
        loaded = Loaded(name, lambda: _called(name), _tokens, LONGEST)
    elif "/" in name or name.startswith("."):
        raise PlanError(
            f"MODEL {name!r}: there is no such directory.{_near(Path(name))} Give one that "
            "save_pretrained() wrote; 'demo' always works"
        )
    else:
        raise PlanError(
            f"MODEL {name!r} is neither a directory with a config.json, nor the name of a config "
            f"class of transformers, nor package.module:factory.{_hint(name)} 'demo' always works"
        )
    if settings.overrides and not is_config(name):
        raise PlanError(f"--set changes fields of a transformers config, and {name!r} has none")
    if not settings.inputs:
        return loaded
    return replace(loaded, inputs=imported(settings.inputs, "--inputs"))


def built(loaded: Loaded) -> nn.Module:
    """The model, on the meta device."""
    try:
        with torch.device("meta"):
            model: object = loaded.build()
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            f"MODEL {loaded.name}: building it on the meta device failed: "
            f"{type(error).__name__}: {error}. A factory takes no arguments and must not look at "
            "values; 'demo' always works"
        ) from error
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"MODEL {loaded.name} returned a {type(model).__name__}; it must return a "
            "torch.nn.Module"
        )
    if not any(True for _ in model.parameters()):
        raise PlanError(f"MODEL {loaded.name}: a {type(model).__name__} without parameters")
    return model


def _called(name: str) -> Any:
    factory = imported(name, "MODEL")
    return factory if isinstance(factory, nn.Module) else factory()


def _tokens(batch: int, sequence: int) -> Tensor:
    return torch.zeros(batch, sequence, dtype=torch.int64, device="meta")


def _demo(name: str) -> Loaded:
    if find_spec("polyshard_demo") is None:
        raise PlanError(
            "MODEL demo needs the demonstration, which is not installed: pip install polyshard-demo"
        )
    demo = import_module("polyshard_demo.model")
    presets = demo.PRESETS
    preset = name.partition(":")[2] or "small"
    if preset not in presets:
        raise PlanError(
            f"MODEL {name}: no preset is called {preset!r}; did you mean "
            f"demo:{nearest(preset, presets, 0)}? Known: {', '.join(presets)}"
        )
    chosen, plan = presets[preset], "polyshard_tensor_parallel:demo_plan"
    build = partial(demo.LanguageModel, chosen)
    return Loaded(f"demo:{preset}", build, _tokens, chosen.sequence, plan)


def _transformers(name: str, settings: Settings) -> Loaded:
    config = config_of(name, settings.overrides)
    longest = int(getattr(config, "max_position_embeddings", None) or LONGEST)
    return Loaded(name, lambda: model_of(config), _masked, min(longest, LONGEST), "*transformers*")


def _masked(batch: int, sequence: int) -> dict[str, Tensor]:
    """With a mask that needs no look at values, which transformers would take otherwise."""
    shape = (batch, 1, sequence, sequence)
    mask = torch.zeros(shape, dtype=torch.bool, device="meta")
    return {"input_ids": _tokens(batch, sequence), "attention_mask": mask}


def _near(path: Path) -> str:
    """The directory beside it with the nearest name, if any is near."""
    close = nearest(path.name, (p.name for p in path.parent.glob("*") if p.is_dir()))
    return f" Did you mean {path.parent / close}?" if close else ""


def _hint(name: str) -> str:
    if "." in name:
        module, _, attribute = name.rpartition(".")
        return f" Did you mean {module}:{attribute}?"
    near = nearest_config(name)
    return f" Did you mean {near}?" if near else ""
