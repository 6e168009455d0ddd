"""Ray Train: workers on nodes of their own (network namespaces)."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_ranks import STEPS, Outcome, Undisturbed, options, wait_for_checkpoint
from launch_ray import RayCluster, ray_cluster

from polyshard_testing.hosts import NoHostsError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray[train] not installed"),
]


@pytest.fixture
def nodes() -> Iterator[RayCluster]:
    """Three of them; trainings use two."""
    try:
        with ray_cluster(3) as made:
            yield made
    except NoHostsError as error:
        pytest.skip(str(error))


def test_a_worker_is_killed_and_then_a_node(
    nodes: RayCluster, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """All workers start again each time; the second time without that node."""
    log = tmp_path / "log"
    training = nodes.train(log, "--workers=2", *options(tmp_path))
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
