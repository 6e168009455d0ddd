"""``--trace``: the package polyshard-trace, where it is installed."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polyshard_demo.errors import DemoError

__all__ = ["MERGED", "check_trace", "merge_trace", "tracer"]

PACKAGE = "polyshard_trace"
MERGED = "trace.json"


def check_trace(folder: Path, engine: str) -> None:
    """Refuse what cannot be traced.

    Raises:
        DemoError: for another engine, or without the package.
    """
    if engine != "polyshard":
        raise DemoError(f"--trace {folder} needs --engine polyshard, got --engine {engine}")
    if find_spec(PACKAGE) is None:
        raise DemoError(
            f"--trace {folder} needs the package polyshard-trace, which is not installed: "
            "pip install polyshard-trace"
        )


def tracer(folder: Path) -> Any:
    """The plugin that writes to ``folder``, a file per rank."""
    return import_module(PACKAGE).Trace(folder)


def merge_trace(folder: Path) -> str:
    """Put the files of all ranks into one; what to say of it.

    Raises:
        DemoError: where that cannot be written.
    """
    package = import_module(PACKAGE)
    try:
        merged = package.merge(folder, folder / MERGED)
    except package.TraceError as error:
        raise DemoError(f"--trace {folder}: {error}") from error
    unsure = max((one.uncertainty_us or 0.0 for one in merged.ranks), default=0.0)
    missing = f", without ranks {list(merged.missing)}" if merged.missing else ""
    return (
        f"traced to {merged.path} ({len(merged.ranks)} ranks, clocks within "
        f"{unsure:,.0f} µs{missing}): open it in https://ui.perfetto.dev, or see "
        f"polyshard trace show {folder}"
    )
