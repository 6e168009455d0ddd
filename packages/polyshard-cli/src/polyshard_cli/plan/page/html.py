"""Sections as one page of HTML, which needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from polyshard.files import replace_file
from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.page.blocks import Block, Items, Section, Table, Text
from polyshard_cli.plan.page.svg import drawn

STYLE = Path(__file__).with_name("style.css")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def check_page(path: Path) -> None:
    """Refuse early what could not be written later.

    Raises:
        PlanError: where no file can be there.
    """
    if path.is_dir():
        raise PlanError(f"--html {path} is a directory; name a file in it: {path / 'plan.html'}")
    if not path.parent.is_dir():
        raise PlanError(f"--html {path}: there is no directory {path.parent}; make it first")


def write_page(path: Path, page: str) -> None:
    """Put ``page`` at ``path``, whole or not at all.

    Raises:
        PlanError: where the system refuses it.
    """
    try:
        replace_file(path, page.encode())
    except OSError as error:
        raise PlanError(f"--html {path}: cannot be written ({error.strerror})") from error


def render(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole page.

    Args:
        title: its heading, and the browser's.
        lead: the sentences below it.
        sections: in the order in which they are read.
    """
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
