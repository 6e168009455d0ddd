"""Pictures of results, one PNG for each kind."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # no display is needed, and none is asked for
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import MIB, Found
from benchmarks.result import Result
from benchmarks.step.rows import ROWS
from benchmarks.step.time import FLOOR, STEP

COLORS = {"polyshard": "#1f6f8b", "torch": "#c8553d"}
SIZE_INCHES = (9.0, 4.0)
DOTS_PER_INCH = 110


def draw_all(results: dict[str, Result], folder: Path) -> None:
    """Draw what ``results`` hold into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = {row.name: results[row.name].found for row in ROWS if row.name in results}
    if steps:
        _save(draw_ratios(steps), folder / "step-time.png")
    for name, result in results.items():
        if result.kind in DRAW:
            _save(DRAW[result.kind](result.found), folder / f"{name}.png")


def draw_ratios(rows: dict[str, Found]) -> Figure:
    """A bar a row: step over FSDP2's; a dash where the row's bar is; a dot for the floor."""
    figure, axes = plt.subplots(figsize=SIZE_INCHES)
    bars = {row.name: {bar.quantity: bar.at_most for bar in row.bars} for row in ROWS}
    axes.bar(list(rows), [f["ratios"][STEP] for f in rows.values()], color=COLORS["polyshard"])
    for place, (name, found) in enumerate(rows.items()):
        if STEP in bars[name]:
            axes.hlines(bars[name][STEP], place - 0.45, place + 0.45, color="black", lw=2)
        if FLOOR in found["ratios"]:
            floor = found["ratios"][STEP] / found["ratios"][FLOOR]
            axes.plot(place, floor, "o", color="white", markeredgecolor="black")
    axes.axhline(1.0, color=COLORS["torch"], lw=1)
    axes.tick_params(axis="x", rotation=35)
    axes.set(ylabel="step time / FSDP2's")
    axes.set_title("polyshard; dash: the bar, dot: the floor, line: FSDP2")
    return figure


def draw_steadiness(found: Found) -> Figure:
    """Resident memory and seconds by step."""
    figure, (left, right) = plt.subplots(1, 2, figsize=SIZE_INCHES)
    for engine, samples in found["samples"].items():
        look = {"color": COLORS[engine], "label": engine}
        left.plot([value / MIB for value in samples["resident_bytes"]], **look)
        right.plot([1e3 * spent for spent in samples["seconds"]], lw=0.8, **look)
    _label(left, "step", "resident MiB")
    _label(right, "step", "ms a step")
    return figure


def draw_host_cost(found: Found) -> Figure:
    """Microseconds a group: by ranks, and by parameters with the fit."""
    figure, panels = plt.subplots(1, 2, figsize=SIZE_INCHES)
    for axes, key in zip(panels, ("ranks", "parameters"), strict=True):
        rows = _varied(found["rows"], key)
        for engine, color in COLORS.items():
            times = [row["microseconds_per_group"][engine] for row in rows]
            axes.loglog([row[key] for row in rows], times, "o-", color=color, label=engine)
        _label(axes, key, "µs a group and step")
    return figure


def _varied(rows: list[Found], key: str) -> list[Found]:
    """The rows in which only ``key`` differs: the largest such family."""
    families: dict[tuple[int, ...], list[Found]] = {}
    for row in rows:
        others = tuple(row[k] for k in ("ranks", "groups", "parameters") if k != key)
        families.setdefault(others, []).append(row)
    largest = sorted(families.values(), key=len)[-1]
    return sorted(largest, key=lambda row: int(row[key]))


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    axes.legend()


def _save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": ""})
    plt.close(figure)


DRAW = {"steadiness": draw_steadiness, "host-cost": draw_host_cost}
"""By kind of result."""
