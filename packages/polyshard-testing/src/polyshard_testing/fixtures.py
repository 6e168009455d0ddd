"""pytest fixtures; enable with ``pytest_plugins = ["polyshard_testing.fixtures"]``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from polyshard_testing import late_rank
from polyshard_testing.world import World


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--late-rank=N``, which :mod:`late_rank` explains."""
    text = "delay rank N in tests that expect exceptions, so that others fail first"
    parser.addoption("--late-rank", type=int, metavar="N", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Ranks take the environment along."""
    rank = config.getoption("--late-rank")
    if rank is not None:
        os.environ[late_rank.VARIABLE] = str(rank)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With a late rank, leave out the tests whose ranks expect no exception."""
    if config.getoption("--late-rank") is not None:
        wanted = [item for item in items if _expects_errors_on_ranks(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
        items[:] = wanted


def _expects_errors_on_ranks(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    has_ranks = any(name.startswith("world") for name in item.fixturenames)
    return has_ranks and late_rank.expects_errors(item.function)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Ranks are replaced between tests, see :meth:`World.rest`."""
    for value in getattr(item, "funcargs", {}).values():
        if isinstance(value, World):
            value.rest()


def _world(size: int, config: pytest.Config) -> Iterator[World]:
    world = World(size, device=config.getoption("--device", "cpu"))
    yield world
    world.close()


@pytest.fixture(scope="session")
def world1(pytestconfig: pytest.Config) -> Iterator[World]:
    """One rank."""
    yield from _world(1, pytestconfig)


@pytest.fixture(scope="session")
def world2(pytestconfig: pytest.Config) -> Iterator[World]:
    """Two gloo ranks."""
    yield from _world(2, pytestconfig)


@pytest.fixture(scope="session")
def world3(pytestconfig: pytest.Config) -> Iterator[World]:
    """Three gloo ranks: nothing divides evenly."""
    yield from _world(3, pytestconfig)


@pytest.fixture(scope="session")
def world4(pytestconfig: pytest.Config) -> Iterator[World]:
    """Four gloo ranks."""
    yield from _world(4, pytestconfig)


@pytest.fixture(scope="session")
def device_judge() -> Iterator[Any]:
    """Judges plugins on polyshard-sim; its ranks stay for the session."""
    sim = pytest.importorskip("polyshard_sim.conformance")
    if missing := sim.missing_tools():
        pytest.skip(f"polyshard-sim cannot be compiled here: {missing}")
    judge = sim.Judge()
    yield judge
    judge.close()
