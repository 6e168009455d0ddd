"""Ray Train: workers on nodes of their own (network namespaces)."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_hosts import NoHostsError
from launch_ranks import STEPS, Outcome, Undisturbed, options, wait_for_checkpoint
from launch_ray import RayCluster, ray_cluster

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


def test_a_node_dies_and_workers_start_again_on_others(
    nodes: RayCluster, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    log = tmp_path / "log"
    training = nodes.train(log, "--workers=2", *options(tmp_path))
    try:
        wait_for_checkpoint(tmp_path, 10)
        busy = [host for host in nodes.network.hosts if works(host.processes())]
        assert len(busy) == 2, "workers are spread over nodes"
        busy[1].crash()
        assert training.wait(240) == 0, log.read_text()
    finally:
        training.send_signal(signal.SIGKILL)
        training.wait()
    outcome = Outcome.of(tmp_path)
    assert [ranks for ranks, _ in outcome.starts] == [2, 2]
    assert 10 <= outcome.starts[1][1] < STEPS
    assert outcome.losses == undisturbed(2).losses


def works(pids: list[int]) -> bool:
    """Whether any of the processes is a worker of the training."""
    titles = (Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)
    return any(b"RayTrainWorker" in title for title in titles)
