"""The grid of groups and steps as a picture; needs ``polyshard-reproducible[picture]``."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path

from polyshard.files import replace_file
from polyshard_reproducible.comparing import Comparison
from polyshard_reproducible.errors import RecordsError
from polyshard_reproducible.records import PHASES

EQUAL = "#d5e8d4"
DIFFERENT = ("#67000d", "#cb181d", "#fb6a4a", "#fcae91", "#fdd9b5")
"""By the phase that differs first; what comes later in a step is paler."""
CELL_INCHES = 0.22


def draw(found: Comparison, path: Path) -> None:
    """Write a PNG; needs no display.

    Raises:
        RecordsError: where matplotlib is missing.
    """
    if find_spec("matplotlib") is None:
        raise RecordsError("matplotlib is missing; pip install 'polyshard-reproducible[picture]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    grid = cells(found)
    width = min(max(CELL_INCHES * len(found.steps) + 2.5, 5), 16)
    height = min(max(CELL_INCHES * len(found.groups) + 2.0, 2.8), 12)
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours = [EQUAL, *DIFFERENT]
    last = len(PHASES)
    axes.pcolormesh(grid, cmap=ListedColormap(colours), vmin=0, vmax=last, ec="w", lw=0.5)
    shown = sorted({value for row in grid for value in row})
    labels = ["equal", *(f"{phase} differ" for phase in PHASES)]
    labels[-1] = "optimizer state differs"
    handles = [Patch(color=colours[value], label=labels[value]) for value in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize="small")
    axes.invert_yaxis()
    axes.set_yticks([row + 0.5 for row in range(len(found.groups))], found.groups)
    every = max(len(found.steps) // 20, 1)
    ticks = range(0, len(found.steps), every)
    axes.set_xticks([column + 0.5 for column in ticks], [str(found.steps[c]) for c in ticks])
    axes.set_xlabel("step")
    title = "equal"
    if (first := found.first) is not None:
        title = f"first: step {first.step}, {first.key.phase} of {first.key.group}"
        row, column = found.groups.index(first.key.group), found.steps.index(first.step)
        axes.plot(column + 0.5, row + 0.5, "X", c="white", mec="black", ms=11)
    axes.set_title(title)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content.getvalue())


def cells(found: Comparison) -> list[list[int]]:
    """A row a group, a column a step: 0 where all is equal, else which phase is not, from 1."""
    first: dict[tuple[str, int], int] = {}
    for difference in found.differences:  # in the order of phases
        cell = difference.key.group, difference.step
        first.setdefault(cell, 1 + PHASES.index(difference.key.phase))
    return [[first.get((group, step), 0) for step in found.steps] for group in found.groups]
