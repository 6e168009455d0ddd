"""polyshard's side of an engine: the plugin objects that its options ask for."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch.optim import Optimizer

from polyshard.errors import PluginError
from polyshard.plugins.discovery import load_plugin
from polyshard_cli.compare.engines.spec import Spec
from polyshard_cli.compare.errors import CompareError
from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.request.names import imported

__all__ = ["Stack", "make_stack"]

FORMATS = ("int8", "int4", "fp8")
"""How names of formats begin; to say what to install where nobody knows them."""


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
    if weights or gradients:
        plugins.append(_quantizing(spec, weights, gradients))
    wraps: list[Callable[[Optimizer], Optimizer]] = []
    if spec.offload:
        offload = _offloading(spec)
        plugins.append(offload)
        wraps.append(offload.wrap)
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
    is_plugin = not isinstance(found, type) and hasattr(found, "polyshard_contract")
    return found if is_plugin else _settled(spec, found)


def _formats() -> tuple[str, ...]:
    if find_spec("polyshard_quantized") is None:
        return ()
    return tuple(import_module("polyshard_quantized").format_names())


def _quantizing(spec: Spec, weights: str, gradients: str) -> Any:
    package = _package(spec, "polyshard_quantized")
    known = package.format_names()
    for name in filter(None, (weights, gradients)):
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1) or [known[0]]
            raise CompareError(
                f"engine {spec.name!r}: no format is called {name!r}; did you mean {close[0]}? "
                f"Known: {', '.join(known)}"
            )
    formats = [package.format_named(name) if name else None for name in (weights, gradients)]
    needs_feedback = formats[1] is not None and formats[1].needs_feedback
    return _settled(
        spec,
        package.QuantizedComm,
        weights=formats[0],
        gradients=formats[1],
        error_feedback=package.ErrorFeedback() if needs_feedback else None,
    )


def _offloading(spec: Spec) -> Any:
    package = _package(spec, "polyshard_offload")
    chosen: dict[str, Any] = dict(spec.offload)
    if "fraction" in chosen:
        try:
            chosen["fraction"] = float(chosen["fraction"])
        except ValueError:
            raise CompareError(
                f"engine {spec.name!r}: {chosen['fraction']} is no number; try 0.5"
            ) from None
    return _settled(spec, package.Offload, **chosen)


def _package(spec: Spec, name: str) -> Any:
    if find_spec(name) is None:
        dashed = name.replace("_", "-")
        raise CompareError(
            f"engine {spec.name!r} needs the plugin {dashed}, which is not installed: "
            f"pip install {dashed}"
        )
    return import_module(name)


def _settled(spec: Spec, make: Any, **chosen: Any) -> Any:
    try:
        return make(**chosen)
    except Exception as error:
        raise CompareError(f"engine {spec.name!r}: {error}") from error
