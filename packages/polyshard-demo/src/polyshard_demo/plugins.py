"""Options that use a plugin or a package of its own, where that is installed."""

from pathlib import Path
from typing import Any

from polyshard_cli.plan.request.plugins import package_of
from polyshard_demo.errors import DemoError
from polyshard_demo.text import Windows

__all__ = [
    "check_slots",
    "check_tp",
    "merge_trace",
    "reproducible",
    "reproducible_plugin",
    "slot_sampler",
    "tensor_parallel_plugin",
]


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


def check_tp(ranks: int, tp: int) -> None:
    """Refuse what cannot be laid out: ``tp`` of the ``ranks`` share each layer, 1 is without.

    Raises:
        DemoError: for numbers that do not divide.
        PlanError: without the plugin.
    """
    if ranks % tp:
        raise DemoError(f"--tp {tp} does not divide --ranks {ranks}; --ranks {2 * tp} would do")
    if tp > 1:
        package_of("polyshard_tensor_parallel", "--tp")


def tensor_parallel_plugin(mesh: Any) -> Any:
    """The plugin over ``mesh``, the tensor-parallel slice; its plan is not applied yet."""
    package = package_of("polyshard_tensor_parallel", "--tp")
    return package.TensorParallel(package.demo_plan(), mesh=mesh)


def check_slots(slots: int, ranks: int, batch: int) -> None:
    """Refuse slots (micro-batches of a step, over all ranks) that cannot be shared.

    Raises:
        DemoError: for numbers that do not divide.
        PlanError: without the plugin.
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


def reproducible() -> Any:
    """The package ``polyshard_reproducible``.

    Raises:
        PlanError: where it is not installed.
    """
    return package_of("polyshard_reproducible", "--reproducible")


def reproducible_plugin(slots: int, seed: int = 0) -> Any:
    """The plugin with so many slots.

    Raises:
        DemoError: for a number that it refuses.
    """
    package = reproducible()
    try:
        return package.Reproducible(slots=slots, seed=seed)
    except package.ReproducibleError as error:
        raise DemoError(f"--reproducible {slots}: {error}") from error


def slot_sampler(windows: Windows, batch: int, slots: int, seed: int) -> Any:
    """Which windows of the text a slot trains on.

    Raises:
        DemoError: for a text that is too short for one step.
    """
    package = reproducible()
    try:
        return package.SlotSampler(windows.count, batch // slots, slots, seed=seed)
    except package.ReproducibleError as error:
        raise DemoError(f"--text {windows.corpus.name} is too short: {error}") from error
