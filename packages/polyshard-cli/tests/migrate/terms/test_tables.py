"""The tables know every name that torch has, and none that polyshard lacks."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch.distributed.fsdp import wrap
from torch.nn.parallel import DistributedDataParallel

import polyshard
from polyshard_cli.migrate.terms import ddp, deepspeed, fsdp1, fsdp2
from polyshard_cli.migrate.terms.catalog import GUIDES, MODULES, know
from polyshard_cli.migrate.terms.term import Table, Verdict

FSDP: Any = torch.distributed.fsdp


def names(table: Table) -> set[str]:
    return {term.theirs for term in table.terms}


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def public(cls: type) -> set[str]:
    """Methods and properties that ``cls`` itself defines."""
    return {name for name in vars(cls) if not name.startswith("_")}


def test_every_name_of_torch_fsdp_is_known() -> None:
    assert set(FSDP.__all__) <= names(fsdp2.NAMES) | names(fsdp1.NAMES)


def test_names_that_move_are_polyshards() -> None:
    moved = {term.theirs for term in fsdp2.NAMES.terms if term.verdict is Verdict.MOVED}
    assert moved == names(fsdp2.NAMES)
    assert moved <= set(polyshard.__all__)


def test_policies_that_move_are_torchs_own_classes() -> None:
    for name in ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"):
        term = fsdp2.NAMES.find(name)
        assert term is not None
        assert "torch's own class" in term.ours
        assert getattr(polyshard, name) is getattr(FSDP, name)


def test_every_keyword_of_fully_shard_is_known_and_taken() -> None:
    theirs = parameters(inspect.unwrap(FSDP.fully_shard)) - {"module"}
    assert theirs <= names(fsdp2.KEYWORDS)
    assert names(fsdp2.KEYWORDS) <= parameters(polyshard.fully_shard)


def test_every_method_of_a_sharded_module_is_known_and_there() -> None:
    assert public(FSDP.FSDPModule) <= names(fsdp2.METHODS)
    assert all(hasattr(polyshard.FSDPModule, name) for name in names(fsdp2.METHODS))


@pytest.mark.parametrize(
    ("function", "table"),
    [
        (FSDP.FullyShardedDataParallel.__init__, fsdp1.KEYWORDS),
        (FSDP.MixedPrecision, fsdp1.PRECISION),
        (DistributedDataParallel.__init__, ddp.KEYWORDS),
    ],
)
def test_every_keyword_of_a_wrapper_is_known_in_its_order(function: Any, table: Table) -> None:
    """Positional arguments are read by this order."""
    theirs = [name for name in inspect.signature(function).parameters if name != "self"]
    assert [term.theirs for term in table.terms][: len(theirs)] == theirs


def test_every_strategy_and_policy_is_known() -> None:
    assert set(FSDP.ShardingStrategy.__members__) <= names(fsdp1.STRATEGIES)
    assert set(wrap.__all__) <= names(fsdp1.POLICIES)
    assert parameters(FSDP.CPUOffload) == {"offload_params"}


def test_every_method_of_a_wrapper_is_known() -> None:
    assert public(FSDP.FullyShardedDataParallel) <= names(fsdp1.METHODS)
    assert public(DistributedDataParallel) <= names(ddp.METHODS)


@pytest.mark.parametrize(
    "table",
    [pytest.param(t, id=f"{guide.name}: {t.title}") for guide in GUIDES for t in guide.tables],
)
def test_no_term_twice_and_all_are_told_what_to_do(table: Table) -> None:
    assert len(names(table)) == len(table.terms)
    for term in table.terms:
        assert term.ours or not term.verdict.is_left, term.theirs
        assert not term.differs or term.differs.endswith("."), term.theirs
        assert not term.ours.endswith("."), term.theirs


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("torch.")])
def test_modules_are_torchs_and_have_names_of_the_tables(module: str) -> None:
    there = importlib.import_module(module)
    known = [name for name in dir(there) if know(f"{module}.{name}")]
    assert known
    for name in known:
        found = know(f"{module}.{name}")
        assert found is not None
        assert found.name == name


def test_what_methods_that_stay_are_called_here() -> None:
    stay = {
        "forward",
        "train",
        "eval",
        "parameters",
        "named_parameters",
        "named_buffers",
        "no_sync",
    }
    for table in (fsdp1.METHODS, ddp.METHODS, deepspeed.METHODS):
        moved = {term.theirs for term in table.terms if term.verdict is Verdict.MOVED}
        assert moved <= stay
    module = type("Module", (polyshard.FSDPModule, torch.nn.Module), {})
    assert all(hasattr(module, name) for name in stay)


def test_policy_fields_are_those_of_torch() -> None:
    fields = {each.name for each in dataclasses.fields(FSDP.MixedPrecisionPolicy)}
    kept = {t.theirs for t in fsdp1.PRECISION.terms if t.verdict is Verdict.REWRITTEN}
    assert kept <= fields
