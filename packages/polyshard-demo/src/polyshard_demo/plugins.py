"""Options that use a plugin or a package of its own, where that is installed."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polyshard_demo.errors import DemoError
from polyshard_demo.text import Windows

__all__ = [
    "check_quantize",
    "check_slots",
    "check_tp",
    "make_offload",
    "merge_trace",
    "package_of",
    "quantizing_plugin",
    "reproducible_plugin",
    "slot_sampler",
    "tensor_parallel_plugin",
    "tracer",
]

NATIVE = "native"
TIERS = ("params", "grads", "optimizer")
KEYS = (*TIERS, "fraction", "path")
PACKAGES = {
    "--offload": "polyshard-offload",
    "--quantize": "polyshard-quantized",
    "--reproducible": "polyshard-reproducible",
    "--tp": "polyshard-tensor-parallel",
}


def package_of(option: str) -> Any:
    """What ``option`` needs.

    Raises:
        DemoError: when it is not installed.
    """
    name = PACKAGES[option]
    if find_spec(name.replace("-", "_")) is None:
        raise DemoError(f"{option} needs {name}, which is not installed: pip install {name}")
    return import_module(name.replace("-", "_"))


def tracer(folder: Path) -> Any:
    """The plugin that writes to ``folder``, a file per rank."""
    from polyshard_cli.trace import Trace

    return Trace(folder)


def merge_trace(folder: Path) -> str:
    """Put the files of all ranks into one; what to say of it.

    Raises:
        DemoError: where that cannot be written.
    """
    from polyshard_cli.trace import TraceError, merge

    try:
        merged = merge(folder, folder / "trace.json")
    except TraceError as error:
        raise DemoError(f"--trace {folder}: {error}") from error
    unsure = max((one.uncertainty_us or 0.0 for one in merged.ranks), default=0.0)
    missing = f", without ranks {list(merged.missing)}" if merged.missing else ""
    return (
        f"traced to {merged.path} ({len(merged.ranks)} ranks, clocks within "
        f"{unsure:,.0f} µs{missing}): open it in https://ui.perfetto.dev, or see "
        f"polyshard trace show {folder}"
    )


def check_tp(ranks: int, tp: int, engine: str) -> None:
    """Refuse what cannot be laid out: ``tp`` of the ``ranks`` share each layer, 1 is without.

    Raises:
        DemoError: for numbers that do not divide, another engine, or without the plugin.
    """
    if tp == 1:
        return
    if tp < 1 or ranks % tp:
        raise DemoError(f"--tp {tp} does not divide --ranks {ranks}; --ranks {2 * tp} would do")
    if engine != "polyshard":
        raise DemoError(f"--tp needs --engine polyshard, got --engine {engine}")
    package_of("--tp")


def tensor_parallel_plugin(mesh: Any) -> Any:
    """The plugin over ``mesh``, the tensor-parallel slice; its plan is not applied yet."""
    package = package_of("--tp")
    return package.TensorParallel(package.demo_plan(), mesh=mesh)


def check_quantize(text: str) -> tuple[str, str]:
    """The formats of parameters and of gradients that ``text`` names.

    Raises:
        DemoError: for a format that the plugin does not know, or when it is not installed.
    """
    names = [name.strip() for name in text.split(",")]
    if set(names) == {NATIVE}:
        raise DemoError(f"--quantize {text} quantizes nothing; leave the option out")
    known = (*package_of("--quantize").format_names(), NATIVE)
    if len(names) > 2 or not set(names) <= set(known):
        raise DemoError(
            f"--quantize takes one of {', '.join(known)}, or two with a comma (parameters, "
            f"gradients); got {text!r}"
        )
    return names[0], names[-1]


def quantizing_plugin(text: str) -> Any:
    """The plugin as ``text`` asks for it, with error feedback for gradients that need it."""
    package = package_of("--quantize")
    weights, gradients = (
        None if name == NATIVE else package.format_named(name) for name in check_quantize(text)
    )
    needs_feedback = gradients is not None and gradients.needs_feedback
    return package.QuantizedComm(
        weights=weights,
        gradients=gradients,
        error_feedback=package.ErrorFeedback() if needs_feedback else None,
    )


def make_offload(text: str) -> Any:
    """The plugin that ``text``, such as ``optimizer=disk,params=host``, asks for; or None.

    Raises:
        DemoError: for text that means nothing, a combination that cannot work, or without the
            plugin.
    """
    chosen: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or name not in KEYS or name in chosen:
            raise DemoError(
                f"--offload {text}: cannot read {part!r}; write each of {', '.join(KEYS)} at most "
                "once, as optimizer=disk,params=host"
            )
        chosen[name] = value
    if not chosen:
        return None
    package = package_of("--offload")
    settings: dict[str, Any] = {name: chosen[name] for name in TIERS if name in chosen}
    try:
        if "fraction" in chosen:
            settings["fraction"] = float(chosen["fraction"])
        if "path" in chosen:
            settings["disk"] = package.DiskSettings(path=Path(chosen["path"]))
        return package.Offload(**settings)
    except ValueError as error:
        raise DemoError(f"--offload {text}: {error}") from error


def check_slots(slots: int, ranks: int, batch: int) -> None:
    """Refuse slots (micro-batches of a step, over all ranks) that cannot be shared.

    Raises:
        DemoError: for numbers that do not divide, or without the plugin.
    """
    reproducible_plugin(slots)
    if slots % ranks:
        raise DemoError(
            f"--reproducible {slots}: {ranks} data-parallel ranks do not divide {slots} slots; "
            "use 1, 2, 4, 8, ... ranks, at most as many as slots"
        )
    if batch % slots:
        raise DemoError(
            f"--batch {batch} does not divide over {slots} slots; use a multiple of {slots}"
        )


def reproducible_plugin(slots: int, seed: int = 0) -> Any:
    """The plugin with so many slots.

    Raises:
        DemoError: for a number that it refuses, or without the plugin.
    """
    package = package_of("--reproducible")
    try:
        return package.Reproducible(slots=slots, seed=seed)
    except package.ReproducibleError as error:
        raise DemoError(f"--reproducible {slots}: {error}") from error


def slot_sampler(windows: Windows, batch: int, slots: int, seed: int) -> Any:
    """Which windows of the text a slot trains on.

    Raises:
        DemoError: for a text that is too short for one step.
    """
    package = package_of("--reproducible")
    try:
        return package.SlotSampler(windows.count, batch // slots, slots, seed=seed)
    except package.ReproducibleError as error:
        raise DemoError(f"--text {windows.corpus.name} is too short: {error}") from error
