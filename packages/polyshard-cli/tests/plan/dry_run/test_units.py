"""Patterns name modules part by part, alone or in runs."""

from __future__ import annotations

import plan_models
import pytest
from torch import nn

from polyshard_cli.plan import PlanError
from polyshard_cli.plan.dry_run.units import units_of


def names(model: nn.Module, *patterns: str) -> dict[str, int]:
    return {name: len(modules) for name, modules in units_of(model, patterns).items()}


def test_a_star_is_one_part_of_a_name() -> None:
    model = plan_models.uneven()
    assert names(model, "blocks.*") == {"blocks.0": 1, "blocks.1": 1, "blocks.2": 1}
    assert names(model, "blocks.*") == names(model)
    assert list(names(model, "head", "blocks.[12].att*ion")) == [
        "blocks.1.attention",
        "blocks.2.attention",
        "head",
    ]
    assert names(model, "none") == {}


def test_runs_end_with_their_list() -> None:
    model = nn.ModuleDict({key: nn.ModuleList(nn.Linear(2, 2) for _ in range(3)) for key in "ab"})
    assert names(model, "*.*/2") == {"a.0": 2, "a.2": 1, "b.0": 2, "b.2": 1}


def test_inner_units_come_before_those_around_them() -> None:
    found = list(names(plan_models.uneven(), "blocks.*", "blocks.*.attention"))
    for index in range(3):
        assert found.index(f"blocks.{index}.attention") < found.index(f"blocks.{index}")


def test_runs_of_no_number_are_refused() -> None:
    with pytest.raises(PlanError, match="how many modules make a unit"):
        units_of(plan_models.uneven(), ("blocks.*/0",))
