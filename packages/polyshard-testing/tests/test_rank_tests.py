"""``@ranks``: one function is the test and what every rank runs."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from polyshard_testing import ranks


@ranks(1, 2)
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_runs_on_every_size_with_what_is_parametrized(rank: int, size: int, factor: float) -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    total = torch.tensor([rank * factor])
    dist.all_reduce(total)
    assert total.item() == factor * size * (size - 1) / 2


def test_a_failing_rank_fails_the_test_and_a_slow_one_too(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import time
        from polyshard_testing import ranks

        @ranks(2)
        def test_one_fails(rank, size):
            assert rank == 0, "rank one is wrong"

        @ranks(2, timeout=8.0)
        def test_one_is_slow(rank, size):
            time.sleep(60 * rank)
        """
    )
    result = pytester.runpytest("-p", "polyshard_testing.fixtures")
    result.assert_outcomes(failed=2)
    text = result.stdout.str()
    assert "rank one is wrong" in text
    assert re.search(r"ranks \[1\] did not answer within \d+ s", text)


def test_ranks_that_the_next_file_does_not_use_are_ended(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ONE", "TWO"):
        monkeypatch.setenv(name, "")
    pids = """
        import multiprocessing
        import os

        def pid(rank, size):
            return os.getpid()

        def alive():
            return {str(process.pid) for process in multiprocessing.active_children()}
    """
    first = """
        def test_both(world1, world2):
            os.environ["ONE"] = str(world1.run(pid)[0])
            os.environ["TWO"] = str(world2.run(pid)[0])
            assert {os.environ["ONE"], os.environ["TWO"]} <= alive()
    """
    second = """
        def test_one(world2):
            assert os.environ["ONE"] not in alive()
            assert os.environ["TWO"] == str(world2.run(pid)[0])
    """
    third = """
        def test_again(world1):
            assert os.environ["TWO"] not in alive()
            os.environ["ONE"] = str(world1.run(pid)[0])
            assert os.environ["ONE"] in alive()
    """
    fourth = """
        from polyshard_testing import ranks

        @ranks(1)
        def test_nothing(rank, size):
            pass
    """
    fifth = """
        def test_one(world1):
            assert os.environ["ONE"] == str(world1.run(pid)[0])
    """
    texts = [pids + first, pids + second, pids + third, fourth, pids + fifth]
    pytester.makepyfile(**{f"test_{number}": text for number, text in enumerate(texts)})
    result = pytester.runpytest("-p", "polyshard_testing.fixtures")
    result.assert_outcomes(passed=5)


def test_ranks_begin_with_what_is_preloaded(pytester: pytest.Pytester) -> None:
    """Though Python has one fork server, for the first that asks, and tests may ask for another."""
    pytester.makepyfile(
        """
        import multiprocessing
        import sys

        from polyshard_testing import world

        def test_forks():
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["json"])
            process = context.Process(target=print)
            process.start()
            process.join()

        def absent(rank, size):
            return sorted(set(world._PRELOADED) - set(sys.modules))

        def test_ranks(world1):
            assert world1.run(absent) == [[]]
        """
    )
    result = pytester.runpytest_subprocess("-p", "polyshard_testing.fixtures")
    result.assert_outcomes(passed=2)


def test_a_function_without_rank_and_size_is_refused() -> None:
    with pytest.raises(TypeError, match=r"needs a function of \(rank, size, \.\.\.\)"):
        ranks(2)(lambda size, rank: None)
