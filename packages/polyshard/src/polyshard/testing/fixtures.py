"""pytest fixtures; enable with ``pytest_plugins = ["polyshard.testing.fixtures"]``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polyshard.testing.world import World


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Ranks are replaced between tests, see :meth:`World.rest`."""
    for value in getattr(item, "funcargs", {}).values():
        if isinstance(value, World):
            value.rest()


def _world(size: int) -> Iterator[World]:
    world = World(size)
    yield world
    world.close()


@pytest.fixture(scope="session")
def world1() -> Iterator[World]:
    """One rank."""
    yield from _world(1)


@pytest.fixture(scope="session")
def world2() -> Iterator[World]:
    """Two gloo ranks."""
    yield from _world(2)


@pytest.fixture(scope="session")
def world3() -> Iterator[World]:
    """Three gloo ranks: nothing divides evenly."""
    yield from _world(3)


@pytest.fixture(scope="session")
def world4() -> Iterator[World]:
    """Four gloo ranks."""
    yield from _world(4)
