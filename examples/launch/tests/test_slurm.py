"""Slurm: a controller and several slurmd on this machine, and the batch script of the example."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_ranks import (
    SCRIPT,
    STEPS,
    Outcome,
    Undisturbed,
    newest,
    options,
    wait_for_checkpoint,
    wait_for_step,
    wait_until,
)
from launch_slurm import Cluster, NoSlurmError, cluster

pytestmark = pytest.mark.slow


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    """Three of them; jobs use two."""
    try:
        with cluster(3) as made:
            yield made
    except NoSlurmError as error:
        pytest.skip(str(error))


def test_a_job_leaves_when_it_is_asked_and_is_requeued(
    nodes: Cluster, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """What ``--signal=B:USR1@60`` sends is sent at a moment of our choice."""
    job = nodes.submit(train=options(tmp_path, "--save-every=1000"))
    wait_for_step(nodes.log, 7)
    nodes.command("scancel", "--batch", "--signal=USR1", str(job))
    nodes.finish(job)
    assert nodes.job(job, "Restarts") == "1"
    assert "The training was asked to leave; restart 1 of" in nodes.log.read_text()
    outcome = Outcome.of(tmp_path)
    assert [ranks for ranks, _ in outcome.starts] == [2, 2]
    assert 7 <= outcome.starts[1][1] < STEPS
    assert outcome.losses == undisturbed(2).losses


def test_a_rank_is_killed_and_then_a_node(
    nodes: Cluster, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """The job is requeued each time; the second time on another node."""
    job = nodes.submit(train=options(tmp_path))
    wait_for_checkpoint(tmp_path, 10)
    assert nodes.job(job, "NodeList") == "node[1-2]"
    second = nodes.network.hosts[1]
    os.kill(ranks_on(second.processes())[0], signal.SIGKILL)
    wait_for_checkpoint(tmp_path, 25)
    assert "The training failed (137); restart 1 of" in nodes.log.read_text()
    second.crash()
    nodes.finish(job)
    assert nodes.job(job, "NodeList") == "node[1,3]"
    outcome = Outcome.of(tmp_path)
    assert [ranks for ranks, _ in outcome.starts] == [2, 2, 2]
    assert 10 <= outcome.starts[1][1] <= 25 <= outcome.starts[2][1] < STEPS
    assert outcome.losses == undisturbed(2).losses


def ranks_on(pids: list[int]) -> list[int]:
    """Those of the processes that are ranks."""
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in pids}
    return [pid for pid, name in names.items() if name[1:2] == [str(SCRIPT).encode()]]


def test_a_job_that_fails_again_and_again_ends(nodes: Cluster, tmp_path: Path) -> None:
    """Not a divisor of the batch: every start fails; after so many the job has failed."""
    job = nodes.submit(
        "--nodes=1",
        "--ntasks=5",
        "--overcommit",
        "--export=ALL,MAX_RESTARTS=1",
        train=options(tmp_path),
    )
    wait_until(lambda: nodes.state(job) == "FAILED", "end of the job", 120)
    assert nodes.job(job, "Restarts") == "1"
    assert newest(tmp_path) == -1


@pytest.mark.thorough
def test_time_runs_out_and_the_job_goes_on(
    nodes: Cluster, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """A training that takes longer than the time limit of its job."""
    train = [*options(tmp_path, "--save-every=1000"), "--pause=2.5"]
    job = nodes.submit("--time=1", train=train)
    nodes.finish(job, 280)
    assert int(nodes.job(job, "Restarts")) >= 1
    assert Outcome.of(tmp_path).losses == undisturbed(2).losses
