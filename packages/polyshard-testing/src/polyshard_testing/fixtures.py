"""pytest fixtures; enable with ``pytest_plugins = ["polyshard_testing.fixtures"]``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any, Protocol

import pytest

from polyshard_testing import late_rank
from polyshard_testing.world import World, start_fork_server


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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start what ranks are forked from with the first test, whose capture is to hold their output.

    It imports torch while tests without ranks run.
    """
    session = item.session
    if not session.stash.get(_HAS_BEGUN, False):
        session.stash[_HAS_BEGUN] = True
        if any(map(_has_ranks, session.items)):
            start_fork_server()


_HAS_BEGUN = pytest.StashKey[bool]()


def _expects_errors_on_ranks(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    return _has_ranks(item) and late_rank.expects_errors(item.function)


def _has_ranks(item: pytest.Item) -> bool:
    return any(name.startswith("world") for name in getattr(item, "fixturenames", ()))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ranks are replaced between tests, see :meth:`World.rest`.

    Those that the next file does not use are ended: an idle rank takes one to two percent of a
    core, for the threads of its process groups and for the alarm. They start again on demand.
    """
    for value in getattr(item, "funcargs", {}).values():
        if isinstance(value, World):
            value.rest()
    if nextitem is not None and nextitem.path != item.path:
        used = _fixtures_of(nextitem)
        for name, ranks in item.config.stash.get(_SHARED, {}).items():
            if name not in used:
                ranks.close()


class _Ranks(Protocol):
    """What starts ranks when they are needed."""

    def close(self) -> None:
        """End them."""


_SHARED = pytest.StashKey[dict[str, _Ranks]]()
"""What files share, by the names of fixtures."""


def _fixtures_of(item: pytest.Item) -> set[str]:
    """Names of the fixtures that tests of this file use."""
    tests = [each for each in item.session.items if each.path == item.path]
    return set().union(*(getattr(each, "fixturenames", ()) for each in tests), *map(_worlds, tests))


def _worlds(item: pytest.Item) -> set[str]:
    """Names of the worlds that a test uses; one of ``@ranks`` asks for its own when it begins."""
    if not isinstance(item, pytest.Function) or item.get_closest_marker("skip"):
        return set()
    found = {name for name in item.fixturenames if re.fullmatch(r"world\d", name)}
    if hasattr(item, "callspec") and "world_size" in item.callspec.params:
        found.add(f"world{item.callspec.params['world_size']}")
    return found


def _shared(request: pytest.FixtureRequest, ranks: Any) -> Iterator[Any]:
    every = request.config.stash.setdefault(_SHARED, {})
    assert request.fixturename is not None
    every[request.fixturename] = ranks
    yield ranks
    ranks.close()


def _world(size: int, request: pytest.FixtureRequest) -> Iterator[World]:
    device = request.config.getoption("--device", "cpu")
    yield from _shared(request, World(size, device=device))


@pytest.fixture(scope="session")
def world1(request: pytest.FixtureRequest) -> Iterator[World]:
    """One rank."""
    yield from _world(1, request)


@pytest.fixture(scope="session")
def world2(request: pytest.FixtureRequest) -> Iterator[World]:
    """Two gloo ranks."""
    yield from _world(2, request)


@pytest.fixture(scope="session")
def world3(request: pytest.FixtureRequest) -> Iterator[World]:
    """Three gloo ranks: nothing divides evenly."""
    yield from _world(3, request)


@pytest.fixture(scope="session")
def world4(request: pytest.FixtureRequest) -> Iterator[World]:
    """Four gloo ranks."""
    yield from _world(4, request)


@pytest.fixture(scope="session")
def device_judge(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Judges plugins on polyshard-sim, with ranks that tests share."""
    sim = pytest.importorskip("polyshard_sim.conformance")
    if missing := sim.missing_tools():
        pytest.skip(f"polyshard-sim cannot be compiled here: {missing}")
    yield from _shared(request, sim.Judge())
