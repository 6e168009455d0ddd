"""The table of combinations is whole, and the page is what it generates."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import subsets
from composition_table import (
    CELLS,
    DTYPES,
    FEATURES,
    FSDP_TP,
    HSDP,
    NEUTRAL,
    PLUGINS,
    REFUSALS,
    STACKS,
)
from make_combination_docs import PAGE, page

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tools/make_combination_docs.py"


def test_the_table_knows_every_plugin_of_the_repository() -> None:
    folders = {path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")}
    assert folders == {f"polyshard-{name}" for name in (*PLUGINS, *NEUTRAL)}
    assert {f"polyshard-{name}" for name in NEUTRAL} == subsets.NEUTRAL


def test_every_subset_meets_every_dtype_and_every_way_to_train() -> None:
    assert len(STACKS) == len(set(STACKS)) == 2 ** len(PLUGINS)
    found = {(cell.stack, cell.dtype, cell.feature) for cell in CELLS}
    assert found == set(product(STACKS, DTYPES, FEATURES))
    assert len({cell.id for cell in CELLS}) == len(CELLS)


def test_meshes_have_the_axes_a_stack_needs() -> None:
    for cell in CELLS:
        assert cell.layout.tensor == 1 or "tensor-parallel" in cell.stack
    for stack in STACKS:
        meshes = {cell.layout for cell in CELLS if cell.stack == stack}
        assert (FSDP_TP if "tensor-parallel" in stack else HSDP) in meshes
        assert any(layout.replicas > 1 for layout in meshes)


def test_refusals_are_named_once_and_say_something() -> None:
    assert len({refusal.id for refusal in REFUSALS}) == len(REFUSALS)
    for refusal in REFUSALS:
        assert refusal.error.endswith("Error")
        assert len(refusal.words) > 5
        assert set(refusal.stack) | set(refusal.absent) <= {*PLUGINS, *NEUTRAL}
