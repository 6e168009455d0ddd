"""Plugins of a plan: installed names, objects to import, and shorthands."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from polyshard.errors import PluginError
from polyshard.installed import load_plugin
from polyshard_cli.plan.errors import PlanError, nearest
from polyshard_cli.plan.request.model import Loaded
from polyshard_cli.plan.request.names import called, imported
from polyshard_cli.plan.request.settings import Settings

TIERS = ("params", "grads", "optimizer", "fraction")
NATIVE = "native"
LLAMA_LIKE = "model.layers.0.self_attn.q_proj"


def make_plugins(settings: Settings) -> list[Any]:
    """The plugins of ``settings``, but for tensor parallelism."""
    made = [_named(name) for name in settings.plugins]
    if settings.quantize:
        made.append(quantizing(settings.quantize))
    if settings.offload:
        made.append(offloading(settings.offload))
    return made


def divided(settings: Settings, loaded: Loaded, model: nn.Module, mesh: DeviceMesh) -> list[Any]:
    """Divide layers of ``model`` over the tensor axis, if there is one; the plugin that did it."""
    size = settings.mesh.size("tensor")
    if size == 1:
        return []
    package = package_of("polyshard_tensor_parallel", f"--mesh with tp={size}")
    name = tensor_plan(settings, loaded, model)
    plan = called(imported(name, "--tp-plan"), f"--tp-plan {name}")
    try:
        plugin = package.TensorParallel(plan, mesh=mesh[settings.mesh.name("tensor")])
        plugin.apply(model)
    except ValueError as error:
        raise PlanError(f"tensor parallelism does not fit the model: {error}") from error
    return [plugin]


def tensor_plan(settings: Settings, loaded: Loaded, model: nn.Module) -> str:
    """``module:function`` that returns the tensor-parallel plan for ``model``."""
    name = settings.tp_plan or loaded.tp_plan
    if not settings.tp_plan and name == "*transformers*":
        is_llama_like = any(found == LLAMA_LIKE for found, _ in model.named_modules())
        name = "polyshard_tensor_parallel:llama_plan" if is_llama_like else ""
    if not name:
        raise PlanError(
            f"tp={settings.mesh.size('tensor')}: no ready-made plan fits {loaded.name}; give "
            "--tp-plan module:function, which returns a polyshard_tensor_parallel.Plan, or leave "
            "tp out of --mesh"
        )
    return name


def _named(name: str) -> Any:
    if ":" in name:
        found = imported(name, "--plugins")
        return found if is_plugin(found) else called(found, f"--plugins {name}")
    try:
        return load_plugin(name)
    except PluginError as error:
        raise PlanError(f"--plugins {name}: {error}") from error


def is_plugin(found: object) -> bool:
    """Whether it is a plugin, not something that makes one."""
    return not isinstance(found, type) and hasattr(found, "polyshard_contract")


def package_of(name: str, option: str) -> Any:
    """The module ``name`` of a plugin's distribution, which ``option`` needs."""
    if find_spec(name) is None:
        dashed = name.replace("_", "-")
        raise PlanError(
            f"{option} needs the plugin {dashed}, which is not installed: pip install {dashed}"
        )
    return import_module(name)


def quantizing(text: str, option: str = "") -> Any:
    """The plugin as ``text`` asks for it: a format, or two of parameters and of gradients.

    One of two may be ``native``; errors name ``option``, which is what the user wrote.
    """
    option = option or f"--quantize {text}"
    package = package_of("polyshard_quantized", option)
    names = [name.strip() for name in text.split(",")]
    known = (*package.format_names(), NATIVE)
    for name in names:
        if name not in known:
            raise PlanError(
                f"{option}: no format is called {name!r}; did you mean "
                f"{nearest(name, known) or known[0]}? Known: {', '.join(known)}"
            )
    if len(names) > 2 or set(names) == {NATIVE}:
        raise PlanError(
            f"{option}: give one format, or two with a comma (parameters, gradients), one of which "
            f"may be {NATIVE}"
        )
    weights, gradients = (
        None if name == NATIVE else package.format_named(name) for name in (names[0], names[-1])
    )
    needs_feedback = gradients is not None and gradients.needs_feedback
    return settled(
        option,
        package.QuantizedComm,
        weights=weights,
        gradients=gradients,
        error_feedback=package.ErrorFeedback() if needs_feedback else None,
    )


def offloading(text: str, option: str = "") -> Any:
    """The plugin that ``text``, such as ``optimizer=disk,params=host``, asks for.

    It may have ``fraction`` and ``path``, too; errors name ``option``.
    """
    option = option or f"--offload {text}"
    package = package_of("polyshard_offload", option)
    chosen: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or key not in (*TIERS, "path") or key in chosen:
            raise PlanError(
                f"{option}: cannot read {part!r}; write each of {', '.join(TIERS)}, path at most "
                "once, as optimizer=host,params=host"
            )
        chosen[key] = value
    if "fraction" in chosen:
        try:
            chosen["fraction"] = float(chosen["fraction"])
        except ValueError:
            words = f"{option}: fraction={chosen['fraction']} is no number; try 0.5"
            raise PlanError(words) from None
    if path := chosen.pop("path", ""):
        chosen["disk"] = settled(option, package.DiskSettings, path=Path(path))
    return settled(option, package.Offload, **chosen)


def settled(option: str, make: Any, **chosen: Any) -> Any:
    """What ``make`` returns; what it refuses is an error in the name of ``option``."""
    try:
        return make(**chosen)
    except ValueError as error:
        raise PlanError(f"{option}: {error}") from error


def tiers_of(plugins: Sequence[Any]) -> dict[str, Any]:
    """Where parameters, gradients and optimizer state rest, and what part of the last is there."""
    for plugin in plugins:
        if getattr(plugin, "name", "") == "offload":
            return {key: getattr(plugin, key) for key in TIERS}
    return {"params": "device", "grads": "device", "optimizer": "device", "fraction": 1.0}
