"""polyshard's side of an engine: the plugin objects that its options ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch.optim import Optimizer

from polyshard.errors import PluginError
from polyshard.installed import load_plugin
from polyshard_cli.compare.engines.spec import Spec
from polyshard_cli.compare.errors import CompareError
from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.request.names import imported
from polyshard_cli.plan.request.plugins import NATIVE, is_plugin, offloading, quantizing

__all__ = ["Stack", "make_stack"]

FORMATS = ("int8", "int4", "fp8")
"""How names of formats begin; to say what to install where no installed plugin has them."""


@dataclass(frozen=True)
class Stack:
    """Plugins for every ``fully_shard`` of a model, and what becomes of its optimizer."""

    plugins: tuple[Any, ...] = ()
    wraps: tuple[Callable[[Optimizer], Optimizer], ...] = ()

    def wrap(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer as the plugins want it."""
        for wrap in self.wraps:
            optimizer = wrap(optimizer)
        return optimizer


def make_stack(spec: Spec) -> Stack:
    """Fresh plugin objects, for one model.

    Raises:
        CompareError: for what is not installed, with what to install, and for settings that a
            plugin refuses.
    """
    plugins: list[Any] = []
    weights, gradients = spec.formats
    for name in spec.plugins:
        if _is_format(name):
            if weights or gradients:
                raise CompareError(
                    f"engine {spec.name!r}: +{name} is both +weights={name} and +gradients={name}; "
                    "leave out one of them"
                )
            weights = gradients = name
        else:
            plugins.append(_named(spec, name))
    option = f"engine {spec.name!r}"
    wraps: list[Callable[[Optimizer], Optimizer]] = []
    try:
        if weights or gradients:
            text = f"{weights or NATIVE},{gradients or NATIVE}"
            plugins.append(quantizing(text, option))
        if spec.offload:
            text = ",".join(f"{tier}={place}" for tier, place in spec.offload)
            plugins.append(offloading(text, option))
            wraps.append(plugins[-1].wrap)
    except PlanError as error:
        raise CompareError(str(error)) from error
    if spec.flat:
        if not find_spec("polyshard_optimizers"):
            raise CompareError("flat needs polyshard-optimizers: pip install polyshard-optimizers")
        wraps.append(import_module("polyshard_optimizers").flat)
    return Stack(tuple(plugins), tuple(wraps))


def _is_format(name: str) -> bool:
    if find_spec("polyshard_quantized") is None:
        return name.startswith(FORMATS)
    return name in import_module("polyshard_quantized").format_names()


def _named(spec: Spec, name: str) -> Any:
    """An installed plugin; or an object to import, or what makes one."""
    try:
        if ":" not in name:
            return load_plugin(name)
        found = imported(name, f"engine {spec.name!r}: plugin")
    except (PluginError, PlanError) as error:
        known = ", ".join(_formats())
        hint = f" Formats: {known}." if known and ":" not in name else ""
        raise CompareError(f"engine {spec.name!r}: {error}{hint}") from error
    return found if is_plugin(found) else _settled(spec, found)


def _formats() -> tuple[str, ...]:
    if find_spec("polyshard_quantized") is None:
        return ()
    return tuple(import_module("polyshard_quantized").format_names())


def _settled(spec: Spec, make: Any) -> Any:
    try:
        return make()
    except Exception as error:
        raise CompareError(f"engine {spec.name!r}: {error}") from error
