"""The comparison as a picture; needs the extra ``polyshard-cli[picture]``."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polyshard.files import replace_file
from polyshard_cli.compare.errors import CompareError
from polyshard_cli.compare.report.document import Comparison, Result

__all__ = ["check_picture", "draw"]

MIB = 1 << 20


def check_picture(path: Path) -> None:
    """Refuse what could not be drawn, before anything is measured.

    Raises:
        CompareError: without matplotlib, or for a format that it does not write.
    """
    if find_spec("matplotlib") is None:
        raise CompareError(
            f"--picture {path} needs matplotlib, which is not installed: "
            "pip install 'polyshard-cli[picture]'"
        )
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise CompareError(f"--picture {path}: give a file that ends in .png, .svg or .pdf")


def draw(found: Comparison, path: Path) -> None:
    """Step times, peaks, bytes and losses of the engines that came to the end.

    Raises:
        OSError: when the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    results = [result for result in found.results if result.error is None]
    height = 5.0 + 0.35 * len(results)
    figure = Figure(figsize=(9, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 3, height_ratios=[0.35 * len(results) + 1, 3])
    times, peaks, sent = (figure.add_subplot(grid[0, column]) for column in range(3))
    names = [result.name for result in results]
    times.boxplot(
        [[1e3 * s for s in r.timing.step_seconds] for r in results if r.timing],
        orientation="horizontal",
        tick_labels=names,
    )
    _bars(peaks, names, [result.peak_bytes / MIB for result in results])
    _bars(sent, names, [(result.sent_bytes or 0) / MIB for result in results])
    for axes, label in ((times, "step, ms"), (peaks, "peak, MiB"), (sent, "sent a step, MiB")):
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
        if axes is not times:
            axes.set_yticklabels([])
    _losses(figure.add_subplot(grid[1, :2]), results)
    _differences(figure.add_subplot(grid[1, 2]), found, results)
    figure.suptitle(f"{found.settings.job}, {found.settings.ranks} ranks")
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:])
    replace_file(path, picture.getvalue())


def _bars(axes: Any, names: list[str], values: list[float]) -> None:
    axes.barh(range(1, len(names) + 1), values, tick_label=names)


def _losses(axes: Any, results: list[Result]) -> None:
    """Lines that lie on each other are told apart by their widths."""
    for index, result in enumerate(results):
        assert result.losses is not None
        width = 1.0 + 1.2 * (len(results) - 1 - index)
        axes.plot(result.losses.steps, lw=width, label=result.name, alpha=0.8)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, mean over ranks")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def _differences(axes: Any, found: Comparison, results: list[Result]) -> None:
    """To the reference's losses; engines without any are left out, in their colours elsewhere."""
    theirs = next(r.losses.steps for r in results if r.losses and r.name == found.reference)
    for index, result in enumerate(results):
        assert result.losses is not None
        pairs = enumerate(zip(result.losses.steps, theirs, strict=True))
        points = [(step, abs(a - b)) for step, (a, b) in pairs if a != b]
        if points:
            axes.plot(*zip(*points, strict=True), "o", ms=3, color=f"C{index % 10}")
            axes.set_yscale("log")
    axes.set_xlim(-0.5, len(theirs) - 0.5)
    axes.set_xlabel("step")
    axes.set_title(f"difference to {found.reference}", fontsize="medium")
    axes.grid(alpha=0.3)
