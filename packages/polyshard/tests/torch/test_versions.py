"""A torch that is newer than any that was tested: it works, and a warning says so once."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from torch import nn

import polyshard
from polyshard._torch import newer
from polyshard.errors import UntestedVersionWarning
from polyshard_testing import ranks

ROOT = Path(__file__).parents[4]


@pytest.fixture
def afresh() -> Iterator[None]:
    """As in a process that has sharded nothing yet."""
    newer.warn_if_untested.cache_clear()
    yield
    newer.warn_if_untested.cache_clear()


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize("version", ["2.16.0", "2.16.0a0+git1234567", "3.0.1+cu140"])
def test_newer_versions_are_said_once(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        newer.warn_if_untested()
        newer.warn_if_untested()
    (warning,) = said
    assert warning.category is UntestedVersionWarning
    assert f"tested with torch 2.11 to 2.15; this is {version}." in str(warning.message)


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize("version", ["2.11.0", "2.15.3+cu130"])
def test_tested_versions_are_not(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        newer.warn_if_untested()


@ranks(2)
def test_sharding_says_it_where_it_was_called(rank: int, size: int) -> None:
    newer.warn_if_untested.cache_clear()
    newest, newer.NEWEST = newer.NEWEST, (2, 0)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = polyshard.fully_shard(nn.Linear(4, 4))
            polyshard.fully_shard(nn.Linear(4, 4))
    finally:
        newer.NEWEST = newest
    found = [(warning.category, warning.filename) for warning in said]
    assert found == [(UntestedVersionWarning, __file__)]
    model(torch.ones(1, 4)).sum().backward()
    assert model.weight.grad is not None


def test_no_distribution_caps_torch() -> None:
    """And all ask for the oldest version that is tested."""
    oldest = ".".join(map(str, newer.OLDEST))
    found = 0
    for file in ROOT.glob("p*/*/pyproject.toml"):
        for text in tomllib.loads(file.read_text("utf-8"))["project"]["dependencies"]:
            requirement = Requirement(text)
            if requirement.name == "torch":
                assert str(requirement.specifier) == f">={oldest}", file
                found += 1
    assert found > 3
