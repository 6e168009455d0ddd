"""The fixture the other tests stand on: it must not hide failures."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from polyshard.testing import RankError, World

pytestmark = pytest.mark.once


def total(rank: int, size: int, base: int) -> int:
    value = torch.tensor(base + rank)
    dist.all_reduce(value)
    return int(value)


def fail_on_one(rank: int, size: int) -> None:
    if rank == 1:
        raise ValueError("a message from rank one")


def hang_on_one(rank: int, size: int) -> None:
    if rank == 1:
        time.sleep(60)


def die_on_one(rank: int, size: int) -> None:
    if rank == 1:
        os._exit(3)


def fail_on_one_and_hang_on_the_other(rank: int, size: int) -> None:
    if rank == 1:
        raise ValueError("a message from rank one")
    time.sleep(60)


def test_answers_come_by_rank_from_the_same_processes() -> None:
    world = World(2)
    try:
        assert world.run(total, 10) == [21, 21]
        assert world.run(process) == world.run(process)
    finally:
        world.close()


def test_ranks_are_replaced_between_tests_when_they_have_run_many_functions() -> None:
    world = World(2)
    try:
        first = world.run(process)
        world.rest()
        assert world.run(process) == first
        for _ in range(30):
            assert world.run(process) == first, "a test goes on with the same ranks"
        world.rest()
        assert not set(world.run(process)) & set(first)
    finally:
        world.close()


def process(rank: int, size: int) -> int:
    return os.getpid()


def test_failures_are_reported_and_the_world_starts_anew() -> None:
    world = World(2)
    try:
        with pytest.raises(RankError, match=r"(?s)rank 1.*fail_on_one.*a message from rank one"):
            world.run(fail_on_one)
        assert world.run(total, 0) == [1, 1]
        with pytest.raises(
            RankError,
            match=r"(?s)ranks \[1\] did not answer within 1 s.*rank 1 stood here.*hang_on_one",
        ):
            world.run(hang_on_one, timeout=1.0)
        with pytest.raises(RankError, match=r"(?s)rank 1.*ended without an answer"):
            world.run(die_on_one)
        assert world.run(total, 0) == [1, 1]
    finally:
        world.close()


def test_without_a_limit_a_failed_rank_still_ends_the_wait() -> None:
    world = World(2, collective_seconds=0.1)
    try:
        with pytest.raises(RankError, match=r"(?s)message from rank one.*\[0\] did not answer"):
            world.run(fail_on_one_and_hang_on_the_other, timeout=None)
    finally:
        world.close()


PROBE = """
import sys

def modules(rank, size):
    return set(sys.modules)

def path(rank, size):
    return sys.path
"""


def probe(folder: Path, name: str) -> Callable[..., Any]:
    (folder / "probe.py").write_text(PROBE)
    spec = importlib.util.spec_from_file_location("probe", folder / "probe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[..., Any] = getattr(module, name)
    return found


def test_a_rank_imports_no_conformance_tests_for_a_function_that_needs_none(
    tmp_path: Path,
) -> None:
    world = World(1)
    try:
        loaded = world.run(probe(tmp_path, "modules"))[0]
    finally:
        world.close()
    assert "polyshard.testing.world" in loaded
    assert not {"pytest", "polyshard.testing.conformance"} & loaded


def test_only_a_file_outside_a_package_has_its_folder_on_the_path(tmp_path: Path) -> None:
    world = World(1)
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "__init__.py").touch()
    try:
        inside = world.run(probe(tmp_path / "inside", "path"))[0]
        outside = world.run(probe(tmp_path, "path"))[0]
    finally:
        world.close()
    assert str(tmp_path / "inside") not in inside
    assert str(tmp_path) in outside
