"""The fixture the other tests stand on: it must not hide failures."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from polyshard.testing import RankError, World


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


def test_answers_come_by_rank_from_the_same_processes() -> None:
    world = World(2)
    try:
        assert world.run(total, 10) == [21, 21]
        assert world.run(process) == world.run(process)
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
        with pytest.raises(RankError, match=r"ranks \[1\] did not answer within 1 s"):
            world.run(hang_on_one, timeout=1.0)
        with pytest.raises(RankError, match=r"(?s)rank 1.*ended without an answer"):
            world.run(die_on_one)
        assert world.run(total, 0) == [1, 1]
    finally:
        world.close()
