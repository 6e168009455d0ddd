"""The table of docs/reference/architectures.md, from what test_architectures.py recorded."""

from __future__ import annotations

import json
from pathlib import Path

from write_pages import page_with, table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "architectures.md"
COLUMNS = ("", "class", "parameters", "losses, relative", "weights", "answers", "transformers")


def files() -> dict[Path, str]:
    """The page."""
    found = json.loads(PAGE.with_suffix(".json").read_text("utf-8"))
    rows = [
        (
            name,
            f"`{each['class']}`",
            f"{each['parameters']:,}",
            *(f"{each[key]:.0e}" if each[key] else "0" for key in ("losses", "weights", "answers")),
            each["transformers"],
        )
        for name, each in found.items()
    ]
    return page_with(PAGE, found=table(COLUMNS, rows))
