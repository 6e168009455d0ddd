"""What MODEL names: the demonstration, a factory to import, or a config of transformers.

Models are built on the meta device: shapes without values.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyshard_cli.needs import is_config
from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.request.configs import config_of, model_of
from polyshard_cli.plan.request.names import imported
from polyshard_cli.plan.request.settings import Settings

LONGEST = 4096
"""Tokens of a sequence where a model would take more and nobody said."""

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
    """What ``settings.model`` names; nothing is built yet.

    Raises:
        PlanError: for a name that means nothing, with the nearest one that does.
    """
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
    make = imported(settings.inputs, "--inputs")
    return Loaded(loaded.name, loaded.build, make, loaded.sequence, loaded.tp_plan)


def built(loaded: Loaded) -> nn.Module:
    """The model, on the meta device.

    Raises:
        PlanError: when the factory raises, or returns something else.
    """
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
    presets = import_module("polyshard_demo.model").PRESETS
    preset = name.partition(":")[2] or "small"
    if preset not in presets:
        close = difflib.get_close_matches(preset, presets, n=1, cutoff=0) or ["small"]
        raise PlanError(
            f"MODEL {name}: no preset is called {preset!r}; did you mean demo:{close[0]}? "
            f"Known: {', '.join(presets)}"
        )
    chosen = presets[preset]
    language_model = import_module("polyshard_demo.model").LanguageModel
    plan = "polyshard_tensor_parallel:demo_plan"
    return Loaded(f"demo:{preset}", lambda: language_model(chosen), _tokens, chosen.sequence, plan)


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
    beside = {p.name: p for p in path.parent.glob("*") if p.is_dir()}
    close = difflib.get_close_matches(path.name, beside, n=1)
    return f" Did you mean {beside[close[0]]}?" if close else ""


def _hint(name: str) -> str:
    if "." in name:
        module, _, attribute = name.rpartition(".")
        return f" Did you mean {module}:{attribute}?"
    from polyshard_cli.plan.request.configs import nearest_config

    near = nearest_config(name)
    return f" Did you mean {near}?" if near else ""
