"""Kubernetes: what is handed in fits Kubeflow's schema, and what pods would run trains."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from launch_ranks import FOLDER, PAUSE, SCRIPT, STEPS, Outcome, Undisturbed, wait_for_step

from polyshard_testing.hosts import INTERFACE, Network, NoHostsError, network

JOB = FOLDER / "kubernetes" / "trainjob.yaml"
RUNTIME = FOLDER / "kubernetes" / "runtime.yaml"
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
@pytest.mark.parametrize("path", [JOB, RUNTIME], ids=lambda path: path.stem)
def test_files_fit_the_schema(path: Path) -> None:
    """Every field of theirs is one of Kubeflow's, and of its type."""
    from kubeflow_trainer_api import models

    given = read(path)
    assert given["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    schema = getattr(models, f"TrainerV1alpha1{given['kind']}")
    assert unknown(given, schema.from_dict(given).to_dict()) == []
    misspelt = {**given, "spec": {**given["spec"], "trianer": {}}}
    assert unknown(misspelt, schema.from_dict(misspelt).to_dict()) == [".spec.trianer"]


def test_the_job_names_the_runtime() -> None:
    job, runtime = read(JOB), read(RUNTIME)
    named = job["spec"]["runtimeRef"]
    assert (named["kind"], named["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    node = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]
    step = node["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
    assert step == "trainer"
    out = next(arg for arg in job["spec"]["trainer"]["args"] if arg.startswith("--out="))
    mount = node["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0]["mountPath"]
    assert out.startswith(f"--out={mount}/")


@contextmanager
def pods(hosts: Network, out: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The job's own command on every host, told where it is as Kubeflow tells its pods."""
    trainer = read(JOB)["spec"]["trainer"]
    assert trainer["command"] == ["torchrun"]
    script, folder = trainer["args"]
    assert Path(script).name == SCRIPT.name
    torchrun = [sys.executable, "-m", "torch.distributed.run", str(SCRIPT)]
    train = [f"--out={out}{folder.removeprefix('--out=')}", f"--steps={STEPS}", PAUSE]
    place = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": hosts.hosts[0].address,
        "PET_MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    with ExitStack() as opened, (out / "log").open("ab") as log:
        started = []
        for node, host in enumerate(hosts.hosts):
            pod = subprocess.Popen(
                [*host.prefix, *torchrun, *train],
                env={**os.environ, **place, "PET_NODE_RANK": str(node)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            opened.callback(pod.wait)
            opened.callback(pod.kill)
            started.append(pod)
        yield started


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
