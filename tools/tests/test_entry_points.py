"""A plugin that is registered by name can be made by name: it needs no argument."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from workspace import ENTRY_POINT_GROUP, distributions

POINTS = [
    EntryPoint(name, value, ENTRY_POINT_GROUP)
    for dist in distributions(Path(__file__).parents[2])
    for name, value in dist.entry_points.get(ENTRY_POINT_GROUP, {}).items()
]


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_plugins_with_a_name_have_defaults(point: EntryPoint) -> None:
    pytest.importorskip(point.module)
    from polyshard.plugins.contract import contract_of

    made = point.load()()
    assert contract_of(made).name == point.name
