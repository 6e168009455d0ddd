"""Draw docs/assets/house.svg from the imports of core.

Floors are those of the import contract in pyproject.toml, so that the picture and what CI enforces
cannot differ.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "packages" / "polyshard" / "src" / "polyshard"
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
PICTURE = ROOT / "docs" / "assets" / "house.svg"

WIDTH, FLOOR, GAP, MARGIN = 1000, 46, 12, 14
LABEL = 150
"""Pixels that a room's name takes; what it says stands behind."""


@dataclass(frozen=True)
class Room:
    """A package or module of core, as a floor of the contract names it."""

    name: str
    files: tuple[Path, ...]
    says: str

    @property
    def label(self) -> str:
        """With a slash where it is a folder."""
        return f"{self.name}/" if len(self.files) > 1 else self.name

    @classmethod
    def of(cls, name: str) -> Room:
        """Read from the source tree; what it says is the first sentence of its docstring."""
        folder = SOURCE / name
        files = tuple(sorted(folder.rglob("*.py"))) if folder.is_dir() else ()
        head = folder / "__init__.py" if files else SOURCE / f"{name}.py"
        text = ast.get_docstring(ast.parse(head.read_text("utf-8"))) or ""
        sentence = re.sub(r":\w+:`([^`]+)`|``", r"\1", " ".join(text.split("\n\n")[0].split()))
        return cls(name, files or (head,), sentence)


def floors() -> list[list[Room]]:
    """Top floor first, as the contract lists them."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = table["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c.get("containers") == ["polyshard"])
    return [[Room.of(name.strip()) for name in layer.split("|")] for layer in layers]


def imports(room: Room) -> Iterator[str]:
    """The rooms that ``room`` imports, once for every import statement."""
    for path in room.files:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("polyshard."):
                target = (node.module or "").split(".")[1]
                if target != room.name:
                    yield target


def picture(house: list[list[Room]]) -> str:
    """The house as SVG: a floor a row, and how many imports each room takes from below."""
    height = len(house) * (FLOOR + GAP) + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fbfaf7"/>',
    ]
    for row, rooms in enumerate(house):
        top = MARGIN + row * (FLOOR + GAP)
        width = (WIDTH - 2 * MARGIN - GAP * (len(rooms) - 1)) / len(rooms)
        for column, room in enumerate(rooms):
            left = MARGIN + column * (width + GAP)
            parts.extend(_box(room, left, top, width))
    return "\n".join([*parts, "</svg>\n"])


def _box(room: Room, left: float, top: int, width: float) -> list[str]:
    wide = width > WIDTH / 2
    taken = Counter(imports(room))
    below = ", ".join(f"{name} {count}" for name, count in sorted(taken.items()))
    size = f"{len(room.files)} files" if len(room.files) > 1 else "1 file"
    box = [
        f'<g><title>{escape(room.says)}</title><rect x="{left:.0f}" y="{top}" width="{width:.0f}" '
        f'height="{FLOOR}" rx="6" fill="#fff" stroke="#5b6b7a"/>',
        f'<text x="{left + 10:.0f}" y="{top + 19}" font-weight="600">{escape(room.label)}</text>',
        f'<text x="{left + 10:.0f}" y="{top + 37}" fill="#5b6b7a" font-size="11">{size}</text>',
    ]
    if wide:
        box.append(f'<text x="{left + LABEL:.0f}" y="{top + 19}">{escape(room.says)}</text>')
        box.append(
            f'<text x="{left + LABEL:.0f}" y="{top + 37}" fill="#5b6b7a" font-size="11">'
            f"imports {escape(below) or 'nothing of the house'}</text>"
        )
    return [*box, "</g>"]


def files() -> dict[Path, str]:
    """The picture."""
    return {PICTURE: picture(floors())}
