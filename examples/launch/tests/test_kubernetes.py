"""Kubernetes: what is handed in fits Kubeflow's schema, and what pods would run trains."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from launch_groups import GROUPS, Groups, lighthouse, needs_torchft
from launch_groups import PAUSE as LONGER
from launch_groups import SCRIPT as GROUP_SCRIPT
from launch_hosts import name_of, named, write_names
from launch_ranks import FOLDER, PAUSE, STEPS, Outcome, Undisturbed, ranks_of, wait_for_step

from polyshard_testing.hosts import INTERFACE, Network, NoHostsError, network

JOB = FOLDER / "kubernetes" / "trainjob.yaml"
GROUP = FOLDER / "kubernetes" / "group.yaml"
RUNTIME = FOLDER / "kubernetes" / "runtime.yaml"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
Popen = subprocess.Popen[bytes]
yaml = pytest.importorskip("yaml", reason="pyyaml not installed")


def read(path: Path) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    return made


def unknown(given: Any, taken: Any, where: str = "") -> list[str]:
    """What was given and is not in what a schema took of it."""
    if isinstance(given, dict):
        names = [f"{where}.{name}" for name in given if name not in taken]
        known = [name for name in given if name in taken]
        return names + [
            one for name in known for one in unknown(given[name], taken[name], f"{where}.{name}")
        ]
    if isinstance(given, list):
        pairs = enumerate(zip(given, taken, strict=True))
        return [one for n, (a, b) in pairs for one in unknown(a, b, f"{where}[{n}]")]
    return [] if given == taken else [where]


@pytest.mark.skipif(
    importlib.util.find_spec("kubeflow_trainer_api") is None,
    reason="kubeflow-trainer-api not installed",
)
@pytest.mark.parametrize("path", [JOB, GROUP, RUNTIME], ids=lambda path: path.stem)
def test_files_fit_the_schema(path: Path) -> None:
    """Every field of theirs is one of Kubeflow's, and of its type."""
    from kubeflow_trainer_api import models

    given = read(path)
    assert given["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    schema = getattr(models, f"TrainerV1alpha1{given['kind']}")
    assert unknown(given, schema.from_dict(given).to_dict()) == []
    misspelt = {**given, "spec": {**given["spec"], "trianer": {}}}
    assert unknown(misspelt, schema.from_dict(misspelt).to_dict()) == [".spec.trianer"]


@pytest.mark.parametrize("path", [JOB, GROUP], ids=lambda path: path.stem)
def test_the_job_names_the_runtime(path: Path) -> None:
    job, runtime = read(path), read(RUNTIME)
    named = job["spec"]["runtimeRef"]
    assert (named["kind"], named["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    node = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]
    step = node["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
    assert step == "trainer"
    out = next(arg for arg in job["spec"]["trainer"]["args"] if arg.startswith("--out="))
    mount = node["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0]["mountPath"]
    assert out.startswith(f"--out={mount}/")


def pod(prefix: list[str], job: Path, out: Path, *more: str, **place: str) -> Popen:
    """The job's own command on a host, told where it is as Kubeflow tells its pods."""
    trainer = read(job)["spec"]["trainer"]
    assert trainer["command"] == ["torchrun"]
    script, *given = trainer["args"]
    local = FOLDER.parent / Path(script).relative_to("/opt")
    train = [arg.replace("--out=/runs", f"--out={out}/runs") for arg in given]
    told = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": "0",
        "PET_MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        **place,
    }
    with (out / "log").open("ab") as log:
        return subprocess.Popen(
            [*prefix, *TORCHRUN, str(local), *train, *more],
            env={**os.environ, **told},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


@contextmanager
def pods(hosts: Network, out: Path) -> Iterator[list[Popen]]:
    """The training's, one on every host."""
    address = hosts.hosts[0].address
    with ExitStack() as opened:
        started = []
        for node, host in enumerate(hosts.hosts):
            more = (f"--steps={STEPS}", PAUSE)
            started.append(
                pod(host.prefix, JOB, out, *more, PET_NODE_RANK=str(node), PET_MASTER_ADDR=address)
            )
            opened.callback(end, started[-1])
        yield started


def end(pod: Popen) -> None:
    """Of a pod, and of its ranks, which leave when torchrun has gone."""
    pod.kill()
    pod.wait()


@pytest.mark.slow
def test_pods_are_evicted_and_started_again(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """An eviction is SIGTERM to what a container runs, here torchrun, which passes it on."""
    with ExitStack() as opened:
        try:
            hosts = opened.enter_context(network(2))
        except NoHostsError as error:
            pytest.skip(str(error))
        with pods(hosts, tmp_path) as started:
            wait_for_step(tmp_path / "log", 7)
            started[1].send_signal(signal.SIGTERM)
            assert all(pod.wait(60) != 0 for pod in started), "both have left"
        with pods(hosts, tmp_path) as started:
            assert [pod.wait(120) for pod in started] == [0, 0], (tmp_path / "log").read_text()
    outcome = Outcome.of(tmp_path / "runs" / "polyshard")
    assert [ranks for ranks, _ in outcome.starts] == [2, 2]
    assert 7 <= outcome.starts[1][1] < STEPS
    assert outcome.losses == undisturbed(2).losses


@pytest.mark.slow
@pytest.mark.timeout(900)  # many interpreters start, and a second run follows
@needs_torchft
def test_pods_of_replica_groups_are_killed_and_come_back(tmp_path: Path) -> None:
    """A rank is killed: its pod fails, and is started again as ``maxRestarts`` says."""
    groups = Groups(tmp_path / "runs" / "groups")
    groups.out.mkdir(parents=True)
    with ExitStack() as opened:
        try:
            hosts = opened.enter_context(network(GROUPS))
        except NoHostsError as error:
            pytest.skip(str(error))
        write_names(tmp_path / "hosts", hosts)
        address = opened.enter_context(lighthouse(hosts.switch))

        def start(group: int) -> Popen:
            host = hosts.hosts[group]
            more = (f"--group={group}", "--steps=0", LONGER)
            place = {"PET_MASTER_ADDR": name_of(host), "TORCHFT_LIGHTHOUSE": address}
            prefix = named(host, tmp_path / "hosts")
            started = pod(prefix, GROUP, tmp_path, *more, **place)
            opened.callback(end, started)
            return started

        running = [start(group) for group in range(GROUPS)]
        groups.wait()
        since = time.time()
        os.kill(ranks_of(GROUP_SCRIPT, hosts.hosts[1].processes())[-1], signal.SIGKILL)
        assert running[1].wait(60) != 0
        running[1] = start(1)
        groups.wait(since)
        print(f"\npod of a killed rank: {groups.recovery(1, since)}")
        assert groups.steps(0, since, alone=True)
        steps = groups.finish()
        assert [pod.wait(120) for pod in running] == [0, 0], (tmp_path / "log").read_text()
    groups.compare(steps, tmp_path / "by-hand")
