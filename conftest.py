"""What every distribution's tests share: the path to helpers, and why tests are skipped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Each distribution's helpers, under names of their own; ranks take this path along.
sys.path[:0] = map(str, sorted(Path(__file__).parent.glob("p*/*/tests/helpers")))

pytest_plugins = ["polyshard.testing.fixtures", "pytester"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where torch sees no accelerator."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return  # the tests of the tooling should not import torch

    import torch

    if not torch.accelerator.is_available():
        skip = pytest.mark.skip(reason="needs an accelerator, and torch sees none")
        for item in marked:
            item.add_marker(skip)
