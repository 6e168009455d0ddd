"""The fixture the other tests stand on: it must not hide failures."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from polyshard._torch.gloo import gloo_groups
from polyshard_testing import RankError, World
from polyshard_testing import world as world_module


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


def test_ranks_are_replaced_between_tests_when_they_have_run_very_many_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(world_module, "_CALLS_OF_A_RANK", 3)
    world = World(2)
    try:
        first = world.run(process)
        world.rest()
        for _ in range(4):
            assert world.run(process) == first, "a test goes on with the same ranks"
        world.rest()
        assert not set(world.run(process)) & set(first)
    finally:
        world.close()


@pytest.mark.parametrize(
    "start_method", ["forkserver", pytest.param("spawn", marks=pytest.mark.thorough)]
)
def test_process_groups_of_a_test_end_with_it(start_method: str) -> None:
    """Also those that only some ranks are in, whose names torch makes from their ranks."""
    world = World(3, start_method=start_method)
    try:
        counts = []
        for _ in range(4):
            counts.append(world.run(make_groups))
            assert world.run(groups) == [4, 3, 3], "what one test made stays until its end"
            world.rest()
        assert world.run(groups) == [1, 1, 1]
        assert counts[1:] == 3 * [counts[1]], "no threads or files are left behind"
    finally:
        world.close()


def make_groups(rank: int, size: int) -> tuple[int, int]:
    """Threads and open files of this rank, with groups of every kind."""
    mesh = dist.init_device_mesh(
        torch.get_default_device().type, (1, size), mesh_dim_names=("replicate", "shard")
    )
    everyone = dist.new_group(list(range(size)), use_local_synchronization=True)
    alone = dist.new_group([0])
    if rank == 0:
        dist.all_reduce(torch.ones(1), group=alone)
    for group in (everyone, mesh.get_group("shard"), mesh.get_group("replicate")):
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        assert value.item() == dist.get_world_size(group)
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def groups(rank: int, size: int) -> int:
    return len(gloo_groups())


def crash_on_one(rank: int, size: int) -> None:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(0)


def crash_in_a_native_thread(rank: int, size: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
    length_of = ctypes.cast(libc.strlen, ctypes.c_void_p)
    libc.pthread_create(ctypes.byref(thread), None, length_of, ctypes.c_void_p(8))
    time.sleep(600)  # torch takes long to find the names of all frames on a busy machine


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
            match=r"(?s)ranks \[1\] did not answer within \d+ s.*rank 1 stood here.*hang_on_one",
        ):
            world.run(hang_on_one, timeout=4.0)
        with pytest.raises(RankError, match=r"(?s)rank 1.*ended without an answer"):
            world.run(die_on_one)
        assert world.run(total, 0) == [1, 1]
        with pytest.raises(
            RankError, match=r"(?s)rank 1.*without an answer \(SIGSEGV\)\nCurrent.*crash_on_one"
        ):
            world.run(crash_on_one)
    finally:
        world.close()


@pytest.mark.skipif(sys.platform != "linux", reason="torch shows native stacks on Linux")
def test_a_native_thread_that_crashes_shows_its_stack() -> None:
    """Python knows no frames of it, so torch writes those of all threads to stderr."""
    script = (
        "from polyshard_testing import World\n"
        "from test_world import crash_in_a_native_thread\n"
        "World(1).run(crash_in_a_native_thread, timeout=250.0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    stacks = [
        each for each in done.stderr.split("SIGSEGV(11), ")[1:] if "fatalSignalHandler" in each
    ]
    (crashed,) = stacks
    assert "libc.so" in crashed
    assert "python frames" not in crashed
    assert "without an answer (SIGSEGV)" in done.stderr


def test_a_rank_that_ends_between_calls_is_told_of() -> None:
    world = World(2)
    try:
        _, pid = world.run(process)
        os.kill(pid, signal.SIGKILL)
        world._processes[1].join()
        with pytest.raises(RankError, match=r"(?s)rank 1.*ended without an answer"):
            world.run(process)
        assert world.run(total, 0) == [1, 1]
    finally:
        world.close()


class TimeLimitError(Exception):
    """What a test's own time limit raises, wherever the test stands."""


def test_what_an_interrupted_call_answers_is_not_the_next_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*args: Any) -> None:
        raise TimeLimitError

    world = World(2)
    try:
        world.run(process)
        with monkeypatch.context() as patch:
            patch.setattr(world_module, "wait", interrupted)
            with pytest.raises(TimeLimitError):
                world.run(total, 10)
        assert world.run(total, 0) == [1, 1]
    finally:
        world.close()


def test_without_a_limit_a_failed_rank_still_ends_the_wait() -> None:
    world = World(2, collective_seconds=6.0)  # ranks have as long to connect
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
    assert "polyshard_testing.world" in loaded
    assert "polyshard_testing.conformance" not in loaded


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
