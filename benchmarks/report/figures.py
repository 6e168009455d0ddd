"""Pictures of results, one PNG for each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display is needed, and none is asked for
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.result import Result
from benchmarks.step.rows import ROWS
from benchmarks.step.spans import PARTS
from benchmarks.step.time import FLOOR, STEP

COLORS = {"polyshard": "#1f6f8b", "torch": "#c8553d"}
SIZE_INCHES = (9.0, 4.0)
DOTS_PER_INCH = 110


def draw_all(results: dict[str, Result], folder: Path) -> None:
    """Draw what ``results`` hold into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row.name for row in ROWS if row.name in results]
    if rows:
        _save(draw_ratios({name: results[name].found for name in rows}), folder / "step-time.png")
    for name, result in results.items():
        if result.kind in _DRAW:
            _save(_DRAW[result.kind](result.found), folder / f"{name}.png")


def draw_ratios(rows: dict[str, dict[str, Any]]) -> Figure:
    """A bar a row: step over FSDP2's; a dash where the row's bar is; a dot for the floor."""
    figure, axes = plt.subplots(figsize=SIZE_INCHES)
    bars = {row.name: {bar.quantity: bar.at_most for bar in row.bars} for row in ROWS}
    places = range(len(rows))
    axes.bar(places, [found["ratios"][STEP] for found in rows.values()], color=COLORS["polyshard"])
    for place, (name, found) in enumerate(rows.items()):
        if STEP in bars[name]:
            axes.hlines(bars[name][STEP], place - 0.45, place + 0.45, color="black", lw=2)
        if FLOOR in found["ratios"]:
            floor = found["ratios"][STEP] / found["ratios"][FLOOR]
            axes.plot(place, floor, "o", color="white", markeredgecolor="black")
    axes.axhline(1.0, color=COLORS["torch"], lw=1)
    axes.set_xticks(list(places), list(rows), rotation=35, ha="right")
    axes.set_ylabel("step time / FSDP2's")
    axes.set_title("polyshard; dash: the bar, dot: the floor, line: FSDP2")
    return figure


def draw_breakdown(found: dict[str, Any]) -> Figure:
    """Two stacks a group, polyshard's and FSDP2's, of milliseconds a step."""
    figure, axes = plt.subplots(figsize=SIZE_INCHES)
    groups = list(found["groups"]["torch"])
    for offset, engine in ((-0.2, "polyshard"), (0.2, "torch")):
        bottom = [0.0] * len(groups)
        for part, shade in zip(PARTS, (0.95, 0.75, 0.55, 0.4, 0.25), strict=True):
            heights = [1e3 * found["groups"][engine].get(g, {}).get(part, 0.0) for g in groups]
            places = [index + offset for index in range(len(groups))]
            axes.bar(
                places,
                heights,
                0.38,
                bottom=bottom,
                color=COLORS[engine],
                alpha=shade,
                label=f"{engine}: {part}",
            )
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(groups)), groups, rotation=35, ha="right")
    axes.set_ylabel("ms a step, in the training thread")
    axes.legend(fontsize=7, ncols=2)
    return figure


def draw_steadiness(found: dict[str, Any]) -> Figure:
    """Resident memory and seconds by step."""
    figure, (left, right) = plt.subplots(1, 2, figsize=SIZE_INCHES)
    for engine, samples in found["samples"].items():
        color = COLORS[engine]
        mib = [value / 2**20 for value in samples["resident_bytes"]]
        left.plot(mib, color=color, label=engine)
        right.plot([1e3 * s for s in samples["seconds"]], color=color, lw=0.8, label=engine)
    _label(left, "step", "resident MiB")
    _label(right, "step", "ms a step")
    return figure


def draw_host_cost(found: dict[str, Any]) -> Figure:
    """Microseconds a group: by ranks, and by parameters with the fit."""
    figure, (left, right) = plt.subplots(1, 2, figsize=SIZE_INCHES)
    for engine, color in COLORS.items():
        for axes, key in ((left, "ranks"), (right, "parameters")):
            rows = _varied(found["rows"], key)
            times = [row["microseconds_per_group"][engine] for row in rows]
            axes.loglog([row[key] for row in rows], times, "o-", color=color, label=engine)
    _label(left, "ranks", "µs a group and step")
    _label(right, "parameters a group", "µs a group and step")
    return figure


def _varied(rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """The rows in which only ``key`` differs: the largest such family."""
    families: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for row in rows:
        others = tuple(row[k] for k in ("ranks", "groups", "parameters") if k != key)
        families.setdefault(others, []).append(row)
    largest = sorted(families.values(), key=len)[-1]
    return sorted(largest, key=lambda row: int(row[key]))


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    axes.legend()


def _save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": ""})
    plt.close(figure)


_DRAW = {
    "breakdown": draw_breakdown,
    "steadiness": draw_steadiness,
    "host-cost": draw_host_cost,
}
