"""Sections as one page of HTML, which needs nothing but a browser.

Bars and plots are SVG, once for a wide screen and once for a phone. The style sheet shows one of
the two, and gives colours: one set for light pages, one for dark ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from polyshard.files import replace_file
from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.page.blocks import Bars, Block, Items, Plot, Section, Table, Text

ROW, HEIGHT, LINE, LETTER = 26, 230, 18, 7.2
"""Pixels of a row of bars, a plot, a line of text, and a letter."""


def drawn(block: Bars | Plot) -> str:
    """``block`` in both widths."""
    return "\n".join(_Drawing(block, kind, width).text() for kind, width in WIDTHS.items())


WIDTHS = {"wide": 1000, "narrow": 430}


@dataclass
class _Drawing:
    """One picture; pixels count from its upper left corner."""

    block: Bars | Plot
    kind: str
    width: int

    def text(self) -> str:
        block = self.block
        labels = [s if isinstance(s, str) else s.label for s in block.series]
        label = block.limit[1] if block.limit else ""
        legend, top = self._legend([*labels, *filter(None, [label])], bool(label))
        body, bottom = self._bars(block, top) if isinstance(block, Bars) else self._plot(block, top)
        name = f"{block.name}-{self.kind}"
        return (
            f'<svg class="{self.kind}" role="img" aria-labelledby="{name}-title" '
            f'viewBox="0 0 {self.width} {bottom:.0f}">'
            f'<title id="{name}-title">{escape(block.title)}</title>'
            f"{''.join((*legend, *body))}</svg>"
        )

    def _legend(self, labels: Sequence[str], has_limit: bool) -> tuple[list[str], float]:
        """Above everything, in as many lines as it takes; and where it ends."""
        found, x, y = [], 4.0, LINE
        for number, label in enumerate(labels):
            if x > 4 and x + 24 + LETTER * len(label) > self.width:
                x, y = 4.0, y + LINE
            is_limit = has_limit and number == len(labels) - 1
            style = "limit" if is_limit else f"fill-{number % 6}"
            found.append(f'<rect class="{style}" x="{x:.0f}" y="{y - 10}" width="10" height="10"/>')
            found.append(_words(x + 15, y, label))
            x += 30 + LETTER * len(label)
        return found, y + 10.0

    def _bars(self, block: Bars, top: float) -> tuple[list[str], float]:
        left = 12 + LETTER * max(map(len, block.rows), default=0)
        ends = [bar.start + bar.length for bar in block.bars]
        most = max([*ends, block.limit[0] if block.limit else 0.0]) or 1.0
        scale, bottom = (self.width - left - 20) / most, top + ROW * len(block.rows)
        found = list(self._ticks(most, left, scale, top, bottom))
        for bar in block.bars:
            size = f'width="{max(scale * bar.length - 0.5, 0):.2f}" height="{0.7 * ROW:.0f}"'
            at = f'x="{left + scale * bar.start:.2f}" y="{top + ROW * (bar.row + 0.15):.0f}"'
            found.append(f'<rect class="fill-{bar.series % 6}" {at} {size}/>')
        for row, name in enumerate(block.rows):
            found.append(_words(left - 8, top + ROW * (row + 0.65), name, "end"))
        if block.limit:
            found.append(_line(left + scale * block.limit[0], top, bottom))
        found.append(_words(left, bottom + 2 * LINE, block.axis))
        return found, bottom + 2.5 * LINE

    def _plot(self, block: Plot, top: float) -> tuple[list[str], float]:
        points = [point for series in block.series for point in series.points]
        lows, highs = ([f(axis) for axis in zip(*points, strict=True)] for f in (min, max))
        left, low = 80.0, min(lows[0], block.limit[0] if block.limit else lows[0])
        most = max(highs[0], block.limit[0] if block.limit else highs[0])
        bottom = top + HEIGHT
        across = (self.width - left - 20) / ((most - low) or 1.0)
        up = (HEIGHT - 10) / (highs[1] or 1.0)
        found = [_words(4, top + 8, block.up), *self._ticks(most, left, across, top, bottom, low)]
        for value in _steps(0.0, highs[1]):
            found.append(_words(left - 8, bottom - up * value + 4, f"{value:g}", "end"))
        for number, series in enumerate(block.series):
            where = [(left + across * (x - low), bottom - up * y) for x, y in series.points]
            if series.is_line:
                path = " ".join(f"{x:.1f},{y:.1f}" for x, y in where)
                found.append(f'<polyline class="stroke-{number % 6}" points="{path}"/>')
            else:
                style = f'class="fill-{number % 6}" r="{3 + number}"'
                found += [f'<circle {style} cx="{x:.1f}" cy="{y:.1f}"/>' for x, y in where]
        if block.limit:
            found.append(_line(left + across * (block.limit[0] - low), top, bottom))
        found.append(_words(left, bottom + 2 * LINE, block.across))
        return found, bottom + 2.5 * LINE

    def _ticks(
        self, most: float, left: float, scale: float, top: float, bottom: float, low: float = 0.0
    ) -> Iterator[str]:
        """Lines from top to bottom, with numbers below them."""
        for value in _steps(low, most):
            x = left + scale * (value - low)
            yield f'<path class="grid" d="M{x:.1f} {top:.0f}V{bottom:.0f}"/>'
            yield _words(x, bottom + LINE, f"{value:g}", "middle")


def _words(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x: float, top: float, bottom: float) -> str:
    return f'<path class="limit" d="M{x:.1f} {top:.0f}V{bottom:.0f}"/>'


def _steps(low: float, high: float) -> Iterator[float]:
    """Four to eight round numbers from ``low`` to ``high``."""
    width = (high - low) or 1.0
    step: float = 10.0 ** math.floor(math.log10(width / 4))
    step = next(step * part for part in (1, 2, 5, 10) if width / (step * part) <= 8)
    for number in range(math.ceil(low / step), math.floor(high / step) + 1):
        yield round(number * step, 12)


STYLE = Path(__file__).with_name("style.css")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def check_page(path: Path) -> None:
    """Refuse early what could not be written later."""
    if path.is_dir():
        raise PlanError(f"--html {path} is a directory; name a file in it: {path / 'plan.html'}")
    if not path.parent.is_dir():
        raise PlanError(f"--html {path}: there is no directory {path.parent}; make it first")


def write_page(path: Path, page: str) -> None:
    """Put ``page`` at ``path``, whole or not at all."""
    try:
        replace_file(path, page.encode())
    except OSError as error:
        raise PlanError(f"--html {path}: cannot be written ({error.strerror})") from error


def render(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole page: ``title`` is its heading and the browser's, ``lead`` is below it."""
    links = "\n".join(f'<li><a href="#{s.name}">{escape(s.title)}</a></li>' for s in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{STYLE.read_text("utf-8")}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
</header>
<nav aria-label="Sections">
<ul>
{links}
</ul>
</nav>
<main>
{"".join(map(_section, sections))}</main>
</body>
</html>
"""


def _section(section: Section) -> str:
    name, blocks = section.name, "\n".join(map(_block, section.blocks))
    heading = f'<h2 id="{name}-heading">{escape(section.title)}</h2>'
    start = f'<section id="{name}" aria-labelledby="{name}-heading">'
    return f"{start}\n{heading}\n{blocks}\n</section>\n"


def _block(block: Block) -> str:
    if isinstance(block, Text):
        return f"<p>{escape(block.words)}</p>"
    if isinstance(block, Items):
        items = (
            f"<li>{f'<strong>{escape(name)}</strong>: ' if name else ''}{escape(words)}</li>"
            for name, words in block.items
        )
        return f"<ul>{''.join(items)}</ul>"
    if isinstance(block, Table):
        return "\n".join(_table(block))
    return f"<figure>\n{drawn(block)}\n</figure>"


def _table(table: Table) -> Iterator[str]:
    """In a box that scrolls, can be reached by keyboard, and has a name."""
    caption = escape(table.caption)
    kinds = [
        ' class="words"' if not place or column in table.words else ""
        for place, column in enumerate(table.columns)
    ]
    yield f'<div class="box" role="region" tabindex="0" aria-label="{caption}">'
    yield '<table class="summed">' if table.has_total else "<table>"
    yield f"<caption>{caption}</caption>"
    heads = zip(table.columns, kinds, strict=True)
    head = "".join(f'<th scope="col"{kind}>{escape(column)}</th>' for column, kind in heads)
    yield f"<thead><tr>{head}</tr></thead>\n<tbody>"
    for row in table.rows:
        cells = [f"<td{k}>{escape(cell)}</td>" for cell, k in zip(row[1:], kinds[1:], strict=True)]
        yield f'<tr><th scope="row" class="words">{escape(row[0])}</th>{"".join(cells)}</tr>'
    yield "</tbody>\n</table>\n</div>"
