"""Where the device cannot be compiled, all tests here are skipped, and say why."""

from __future__ import annotations

import pytest

from polyshard_sim.building import missing_tools


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Needs a compiler."""
    if missing := missing_tools():
        for item in items:
            if "polyshard-sim" in str(item.path):
                item.add_marker(pytest.mark.skip(reason=f"cannot compile: {missing}"))
