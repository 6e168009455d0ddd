import operator
import os

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import run_alone, run_ranks
from polyshard.testing import RankError


def test_ranks_are_fresh_processes_in_a_group_and_the_first_one_answers() -> None:
    assert run_ranks(2, dist.get_world_size) == 2
    assert run_ranks(2, dist.get_rank) == 0
    assert run_ranks(2, torch.get_num_threads) == 1
    assert run_ranks(1, os.getpid) not in (os.getpid(), run_ranks(1, os.getpid))


def test_a_rank_that_fails_is_told_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0.*ZeroDivisionError"):
        run_ranks(2, operator.truediv, 1, 0)


def test_a_process_alone_has_no_group_and_one_thread() -> None:
    assert run_alone(dist.is_initialized) is False
    assert run_alone(torch.get_num_threads) == 1
    with pytest.raises(ZeroDivisionError):
        run_alone(operator.truediv, 1, 0)
