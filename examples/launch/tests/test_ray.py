"""Ray Train: workers on nodes of their own (network namespaces)."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import launch_survivors
import pytest
from launch_groups import PAUSE, Groups, lighthouse, needs_torchft
from launch_ranks import STEPS, Outcome, Undisturbed, options, wait_for_checkpoint, wait_until
from launch_ray import GROUP, SCRIPT, RayCluster, ray_cluster

from polyshard_testing.hosts import Host, NoHostsError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray[train] not installed"),
]


@pytest.fixture
def nodes(request: pytest.FixtureRequest) -> Iterator[RayCluster]:
    """Three of them, of one CPU or as many as the test says; trainings use two."""
    try:
        with ray_cluster(3, getattr(request, "param", 1)) as made:
            yield made
    except NoHostsError as error:
        pytest.skip(str(error))


def test_a_worker_is_killed_and_then_a_node(
    nodes: RayCluster, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """All workers start again each time; the second time without that node."""
    log = tmp_path / "log"
    place = f"--address={nodes.address}"
    training = nodes.run(log, SCRIPT, place, "--workers=2", *options(tmp_path))
    try:
        wait_for_checkpoint(tmp_path, 10)
        busy = {host.address: workers(host.processes()) for host in nodes.network.hosts}
        killed = [address for address, pids in busy.items() if pids][1]
        assert sorted(map(len, busy.values())) == [0, 1, 1], "workers are spread over nodes"
        os.kill(busy[killed][0], signal.SIGKILL)
        wait_for_checkpoint(tmp_path, 25)
        lost = next(host for host in nodes.network.hosts if workers(host.processes()))
        lost.crash()
        assert training.wait(240) == 0, log.read_text()
    finally:
        training.kill()
        training.wait()
    outcome = Outcome.of(tmp_path)
    assert [ranks for ranks, _ in outcome.starts] == [2, 2, 2]
    assert 10 <= outcome.starts[1][1] <= 25 <= outcome.starts[2][1] < STEPS
    assert outcome.losses == undisturbed(2).losses


def workers(pids: list[int]) -> list[int]:
    """Those of the processes that are workers of the training."""
    return [pid for pid in pids if b"RayTrainWorker" in title(pid)]


def title(pid: int) -> bytes:
    """What a process calls itself; nothing when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


def test_survivors_of_an_attempt(
    nodes: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that raises ends nothing; where one dies, others live until Ray looks again."""
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "20")
    script = Path(launch_survivors.__file__).with_name("launch_survivors_ray.py")
    log = tmp_path / "log"
    training = nodes.run(log, script, nodes.address, str(tmp_path), "2")
    assert training.wait(120) == 0, log.read_text()
    launch_survivors.check(tmp_path, is_saved=True)
    launch_survivors.check_again(tmp_path)


@pytest.mark.timeout(900)  # many interpreters start, and a second run follows
@needs_torchft
@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_replica_groups_are_killed_and_come_back(nodes: RayCluster, tmp_path: Path) -> None:
    """A worker of a group, then the node of a group: the other group continues meanwhile."""
    groups, running = Groups(tmp_path / "run"), []
    place: list[Host] = []
    groups.out.mkdir()
    with lighthouse(nodes.network.switch) as address, ExitStack() as opened:
        for group in range(2):
            given = [f"--address={nodes.address}", f"--lighthouse={address}"]
            given += [f"--group={group}", f"--out={groups.out}", PAUSE]
            log = tmp_path / f"log-{group}"
            running.append(nodes.run(log, GROUP, *given))
            opened.callback(running[-1].wait)
            opened.callback(running[-1].kill)
            wait_until(partial(groups.steps, group), f"step of group {group}")
            busy = {host for host in nodes.network.hosts if workers(host.processes())}
            place += busy.difference(place)
        groups.wait()
        for group, kill in ((1, kill_a_worker), (0, Host.crash)):
            since = time.time()
            kill(place[group])
            groups.wait(since)
            print(f"\n{kill.__name__}: {groups.recovery(group, since)}")
            assert groups.steps(1 - group, since, alone=True)
        steps = groups.finish()
        codes = [training.wait(120) for training in running]
        assert codes == [0, 0], [log.read_text() for log in tmp_path.glob("log-*")]
    groups.compare(steps, tmp_path / "by-hand")


def kill_a_worker(host: Host) -> None:
    """The last one on it."""
    os.kill(workers(host.processes())[-1], signal.SIGKILL)
