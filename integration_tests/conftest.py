"""Helpers beside the tests can be imported, by ranks too; a session says which cells it runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "examples" / "models"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--stack`` is how a session runs its own cells, and no other's."""
    parser.addoption(
        "--stack",
        help="plugins that are to be installed, joined by '+', or 'core' for none: run the cells "
        "of exactly this stack (default: of every stack that can be made of what is installed)",
    )
    parser.addoption(
        "--all-faults",
        action="store_true",
        help="run every cell of the table of faults, not a sample where some plugins are installed",
    )
