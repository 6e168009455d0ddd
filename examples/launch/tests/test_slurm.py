"""Slurm: a controller and several slurmd on this machine, and the batch script of the example."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import launch_survivors
import pytest
from launch_groups import PAUSE, Groups, lighthouse, needs_torchft
from launch_groups import SCRIPT as GROUP_SCRIPT
from launch_ranks import (
    SCRIPT,
    STEPS,
    Outcome,
    Undisturbed,
    newest,
    options,
    ranks_of,
    wait_for_checkpoint,
    wait_for_step,
    wait_until,
)
from launch_slurm import GROUPS, Cluster, NoSlurmError, cluster

from polyshard_testing.hosts import Host

pytestmark = pytest.mark.slow


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    """Three of them; jobs use two."""
    try:
        with cluster(3) as made:
            yield made
            print(made.said())  # shown where a test has failed
    except NoSlurmError as error:
        pytest.skip(str(error))


def test_a_job_leaves_when_it_is_asked_and_is_requeued(
    nodes: Cluster, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """What ``--signal=B:USR1@60`` sends is sent at a moment of our choice."""
    job = nodes.submit(train=options(tmp_path, "--save-every=1000"))
    wait_for_step(nodes.log, 7)
    nodes.command("scancel", "--batch", "--signal=USR1", job)
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
    os.kill(ranks_of(SCRIPT, second.processes())[0], signal.SIGKILL)
    wait_for_checkpoint(tmp_path, 25)
    assert "The training failed (137); restart 1 of" in nodes.log.read_text()
    second.crash()
    nodes.finish(job)
    assert nodes.job(job, "NodeList") == "node[1,3]"
    outcome = Outcome.of(tmp_path)
    assert [ranks for ranks, _ in outcome.starts] == [2, 2, 2]
    assert 10 <= outcome.starts[1][1] <= 25 <= outcome.starts[2][1] < STEPS
    assert outcome.losses == undisturbed(2).losses


@pytest.mark.parametrize(
    ("options", "is_saved"),
    [(["--kill-on-bad-exit=1"], False), (["--kill-on-bad-exit=0", "--wait=20"], True)],
    ids=["killed", "waited-for"],
)
def test_survivors_of_an_attempt(
    options: list[str], is_saved: bool, nodes: Cluster, tmp_path: Path
) -> None:
    """A rank that raises ends nothing; where one dies, ``--wait`` is how long others may save."""
    run = [sys.executable, str(launch_survivors.SCRIPT), str(tmp_path), "2"]
    assert nodes.srun(*options, run=run) != 0
    launch_survivors.check(tmp_path, is_saved)
    if is_saved:
        assert nodes.srun(*options, run=run) == 0
        launch_survivors.check_again(tmp_path)


@pytest.mark.timeout(900)  # many interpreters start, and a second run follows
@needs_torchft
def test_replica_groups_are_killed_and_come_back(nodes: Cluster, tmp_path: Path) -> None:
    """A rank of a group, then the node of a group: the other group continues by itself."""
    groups = Groups(tmp_path / "run")
    groups.out.mkdir()
    hosts = nodes.network.hosts
    with lighthouse(nodes.network.switch) as address:
        given = f"--export=ALL,SCRIPT={GROUP_SCRIPT},TORCHFT_LIGHTHOUSE={address}"
        train = [f"--out={groups.out}", PAUSE]
        job = nodes.submit("--array=0-1", "--overcommit", given, train=train, batch=GROUPS)
        tasks = [f"{job}_{group}" for group in range(2)]
        groups.wait()
        for group, kill in ((1, kill_a_rank), (0, Host.crash)):
            place = int(nodes.job(tasks[group], "NodeList").removeprefix("node"))
            since = time.time()
            kill(hosts[place - 1])
            groups.wait(since)
            print(f"\n{kill.__name__}: {groups.recovery(group, since)}")
            assert groups.steps(1 - group, since, alone=True)
        steps = groups.finish()
        for task in tasks:
            nodes.finish(task)
    assert [nodes.job(task, "Restarts") for task in tasks] == ["1", "0"]
    assert nodes.log.read_text().count("Group 1 failed; restart 1 of") == 1
    groups.compare(steps, tmp_path / "by-hand")


def kill_a_rank(host: Host) -> None:
    """The last one on it."""
    os.kill(ranks_of(GROUP_SCRIPT, host.processes())[-1], signal.SIGKILL)


@pytest.mark.parametrize(
    ("ranks", "option", "restarts"),
    [(1, "--no-such-option", 1), (5, "--save-every=7", 0)],
    ids=["fails", "is a mistake"],
)
def test_a_job_that_fails_again_and_again_ends(
    nodes: Cluster, tmp_path: Path, ranks: int, option: str, restarts: int
) -> None:
    """After so many starts; one that says that it would fail again (5 ranks) is not repeated."""
    job = nodes.submit(
        "--nodes=1",
        f"--ntasks={ranks}",
        "--overcommit",
        "--export=ALL,MAX_RESTARTS=1",
        train=options(tmp_path, option),
    )
    wait_until(lambda: nodes.state(job) == "FAILED", "end of the job", 120)
    assert nodes.job(job, "Restarts") == str(restarts)
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
