"""torchrun: agents on hosts of their own (network namespaces), with rendezvous c10d, elastic."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import launch_survivors
import pytest
from fault_cluster import Job, job
from launch_ranks import SCRIPT, STEPS, Outcome, Undisturbed, by_hand, options, wait_for_checkpoint

from polyshard_testing.hosts import NoHostsError

pytestmark = pytest.mark.slow


class Starter:
    """Starts jobs on hosts that are gone when the test ends."""

    def __init__(self, opened: ExitStack) -> None:
        self._opened = opened

    def __call__(self, hosts: int, out: Path) -> Job:
        try:
            return self._opened.enter_context(job(hosts, 1, options(out), SCRIPT, 2))
        except NoHostsError as error:
            pytest.skip(str(error))


@pytest.fixture
def start() -> Iterator[Starter]:
    with ExitStack() as opened:
        yield Starter(opened)


def finish(running: Job, *names: str) -> None:
    """Wait for the end of the agents on these hosts."""
    for name in names:
        assert running.agents[name].process.wait(120) == 0, running.said()


@pytest.mark.parametrize("hosts", [2, 3])
def test_agents_on_two_and_three_hosts(
    hosts: int, start: Starter, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    running = start(hosts, tmp_path)
    finish(running, *running.agents)
    outcome = Outcome.of(tmp_path)
    assert outcome.starts[-1] == (hosts, outcome.starts[-1][1])
    assert outcome.losses == undisturbed(hosts).losses


def test_an_agent_is_killed_and_two_of_three_go_on(
    start: Starter, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """They resume with the checkpoint, and get the losses that two ranks get from there."""
    out = tmp_path / "elastic"
    running = start(3, out)
    wait_for_checkpoint(out, 10)
    lost, *stay = running.network.hosts
    fault = time.monotonic()
    lost.crash()
    finish(running, *(host.name for host in stay))
    print(f"\nan agent of three is lost: done {time.monotonic() - fault:.1f} s later")
    outcome = Outcome.of(out)
    assert [ranks for ranks, _ in outcome.starts] == [3, 2]
    resumed = outcome.starts[1][1]
    assert 10 <= resumed < STEPS

    again = tmp_path / "by-hand"  # three ranks as far as that checkpoint, two from there
    again.mkdir()
    assert by_hand(3, again, f"--steps={resumed}") == [0] * 3
    assert by_hand(2, again, f"--steps={STEPS}") == [0] * 2
    assert outcome.losses == Outcome.of(again).losses
    assert outcome.losses == pytest.approx(undisturbed(3).losses, rel=1e-4)


def test_losses_hardly_depend_on_the_number_of_ranks(undisturbed: Undisturbed) -> None:
    assert undisturbed(3).losses == pytest.approx(undisturbed(2).losses, rel=1e-4)


@pytest.mark.parametrize("handles", [False, True])
def test_survivors_of_an_attempt(handles: bool, tmp_path: Path) -> None:
    """A rank that raises ends nothing; where one dies, others that handle SIGTERM have 30 s."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = [*torchrun, "--nproc-per-node=2", str(launch_survivors.SCRIPT), str(tmp_path), "2"]
    run += ["--handle-sigterm"] if handles else []
    assert subprocess.run(run, timeout=120, check=False).returncode != 0
    launch_survivors.check(tmp_path, is_saved=handles)
    if handles:
        assert subprocess.run(run, timeout=120, check=False).returncode == 0
        launch_survivors.check_again(tmp_path)
