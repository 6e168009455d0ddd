"""Drawings to SVG that takes its colours from the page around it.

[Note: colours of the page]
matplotlib is given colours that stand for the page's: each is replaced by a custom property of the
style sheet, which has one value for light pages and one for dark ones.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from html import escape
from typing import Any

from polyshard_cli.plan.page.blocks import Drawing
from polyshard_cli.plan.page.canvas import INK, LINE, PROPERTIES, SURFACE, Canvas

__all__ = ["svgs"]


def svgs(drawing: Drawing) -> str:
    """``drawing`` for a wide screen and for a phone, of which the style sheet shows one."""
    return "\n".join(_svg(drawing, is_wide=is_wide) for is_wide in (True, False))


def _svg(drawing: Drawing, *, is_wide: bool) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    width = 10.5 if is_wide else 4.5
    height = 0.9 + (0.36 if is_wide else 0.42) * drawing.rows + (0.0 if is_wide else 0.5)
    settings: Any = dict(_settings(is_wide))  # matplotlib lists its settings as a type
    with rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        drawing.draw(Canvas(figure.subplots(), is_wide))
        file = io.StringIO()
        nothing: dict[str, Any] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=nothing, transparent=True)
    name = f"{drawing.name}-{'wide' if is_wide else 'narrow'}"
    return _adapted(file.getvalue(), name, drawing.title)


def _settings(is_wide: bool) -> Iterator[tuple[str, Any]]:
    yield "svg.fonttype", "none"  # text that can be read, found and enlarged
    yield "svg.hashsalt", "polyshard"  # the same names in every run
    yield "text.parse_math", False  # a dollar in a name is a dollar
    yield "font.size", 9.5 if is_wide else 10.5
    yield from ((name, "medium") for name in ("xtick.labelsize", "ytick.labelsize"))
    for name in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color"):
        yield name, INK
    yield from (("axes.edgecolor", LINE), ("grid.color", LINE), ("grid.linewidth", 0.6))
    yield from ((f"axes.spines.{side}", False) for side in ("top", "right", "left"))
    yield from (("axes.axisbelow", True), ("legend.frameon", False), ("legend.fontsize", "medium"))
    yield from (("legend.handlelength", 1.0), ("legend.columnspacing", 1.2))
    yield from (("patch.edgecolor", SURFACE), ("lines.linewidth", 1.5))


def _adapted(text: str, name: str, title: str) -> str:
    """matplotlib's file as a part of a page: its names, colours and fonts are the page's."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    for colour, variable in PROPERTIES.items():
        text = text.replace(colour, variable)
    kind = "wide" if name.endswith("wide") else "narrow"
    box = re.search(r'viewBox="[^"]+"', text)
    assert box is not None, "matplotlib writes a viewBox"
    head = (
        f'<svg class="{kind}" role="img" aria-labelledby="{name}-title" {box[0]} '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
        f'<title id="{name}-title">{escape(title)}</title>'
    )
    return head + text[text.index(">") + 1 :].strip()
