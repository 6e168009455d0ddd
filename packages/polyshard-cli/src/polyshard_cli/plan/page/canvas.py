"""Where a drawing goes: matplotlib's axes, in colours that stand for the page's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["INK", "LINE", "PROPERTIES", "SURFACE", "Canvas", "unit_of"]

INK, LINE, SURFACE = "#010101", "#020202", "#030303"
SERIES = tuple(f"#0404{number:02x}" for number in range(6))
PROPERTIES: Mapping[str, str] = {
    INK: "var(--ink)",
    LINE: "var(--line)",
    SURFACE: "var(--surface)",
    **{colour: f"var(--series-{number})" for number, colour in enumerate(SERIES)},
}
"""What each colour stands for in the style sheet: see [Note: colours of the page]."""


@dataclass(frozen=True)
class Canvas:
    """Axes, and how much room there is."""

    axes: Axes
    is_wide: bool

    def colour(self, number: int) -> str:
        """That of the series ``number``."""
        return SERIES[number % len(SERIES)]

    def lanes(self, names: Sequence[str]) -> None:
        """Name the rows from top to bottom, for bars at 0, 1, 2, ..."""
        self.axes.set_yticks(range(len(names)), names)
        self.axes.set_ylim(len(names) - 0.4, -0.6)
        self.axes.tick_params(axis="y", length=0)
        self.axes.grid(axis="x")

    def count(self, name: str) -> None:
        """Whole numbers of ``name`` along the axes."""
        from matplotlib.ticker import MaxNLocator

        self.axes.grid()
        self.axes.set_xlabel(name)
        self.axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    def legend(self, columns: int, narrow: int = 2) -> None:
        """Above the axes, in so many columns; ``narrow`` of them where there is little room."""
        handles, labels = self.axes.get_legend_handles_labels()
        if labels:
            self.axes.legend(
                handles,
                labels,
                loc="lower left",
                bbox_to_anchor=(0.0, 1.0),
                ncols=columns if self.is_wide else narrow,
                borderaxespad=0.2,
            )

    def limit(self, at: float, words: str) -> None:
        """A line across that nothing should pass."""
        self.axes.axvline(at, color=INK, lw=1.5, ls="--", label=words)


def unit_of(largest: int) -> tuple[int, str]:
    """The largest unit of which there is at least one in ``largest`` bytes: its size, its name."""
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1 << 10 * power:
            return 1 << 10 * power, name
    return 1, "bytes"
