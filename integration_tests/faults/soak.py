"""Weeks in a few minutes: steps, evaluations, saves and failures, and what grows meanwhile."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from sharded import digest, whole
from toy_meeting import await_all

from fault_table import TIMEOUT_SECONDS
from faults.model import Injection, Purpose, Training
from faults.processes import PATIENT_SECONDS, Ranks
from polyshard.errors import PeerError
from polyshard_checkpoint import Checkpoints, TrainingState

PLACES = ("forward", "backward", "codec", "observer")
"""Where no rank can have ended the step before another fails in it."""


@dataclass(frozen=True)
class Length:
    """Of a soak, in steps, and how often something else happens."""

    steps: int = 2000
    evaluate_every: int = 20
    save_every: int = 100
    fail_every: int = 50
    sample_every: int = 50
    seed: int = 0


@dataclass(frozen=True)
class Sample:
    """What one rank holds after so many steps."""

    step: int
    resident_kib: int
    descriptors: int
    threads: int
    python_threads: int
    store_keys: int


@dataclass(frozen=True)
class Soaked:
    """One rank's account."""

    samples: list[Sample]
    failures: int
    end: str


def measure(ranks: int, length: Length) -> list[Soaked]:
    """Run a soak, and the same without failures; the end must be the same.

    Raises:
        AssertionError: if it is not.
    """
    with TemporaryDirectory(prefix="polyshard-soak-") as folder:
        patience = PATIENT_SECONDS + 1.0 * length.steps
        alike = Ranks(ranks, TIMEOUT_SECONDS)
        found: list[Soaked] = alike.run(_soak, length, folder, True, patience=patience)
        whole_run: list[Soaked] = alike.run(_soak, length, folder, False, patience=patience)
    assert all(each.failures == len(_failing(length)) for each in found), found
    assert {each.end for each in found} == {each.end for each in whole_run}
    return found


def _failing(length: Length) -> range:
    return range(length.fail_every, length.steps, length.fail_every)


def _soak(rank: int, size: int, length: Length, folder: str, fails: bool) -> Soaked:
    training = Training(lambda: None)
    state = TrainingState(training.model, [training.optimizer], random=False)
    samples: list[Sample] = []
    failures = 0
    with Checkpoints(Path(folder, str(fails)), keep=2) as checkpoints:
        for step in range(length.steps):
            if fails and step in _failing(length):
                failures += _fail(training, Injection.draw(length.seed, step, size, PLACES), step)
            training.step(step)
            if step % length.evaluate_every == 0:
                training.evaluate()
            if step % length.save_every == 0:
                checkpoints.save(step, state)
            if step % length.sample_every == length.sample_every - 1:
                samples.append(_sample(step + 1))
    tensors = {name: whole(each.detach()) for name, each in training.model.named_parameters()}
    return Soaked(samples, failures, digest(tensors))


def _fail(training: Training, injection: Injection, step: int) -> bool:
    if injection.rank == dist.get_rank():
        training.prepare(injection)
    try:
        training.step(step)
    except (Purpose, PeerError):
        training.recover()
        return True
    return False


def _sample(step: int) -> Sample:
    gc.collect()
    await_all("sampled", dist.get_world_size())  # none is in the middle of anything
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    store: Any = dist.distributed_c10d._get_default_store()
    return Sample(
        step=step,
        resident_kib=pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        python_threads=threading.active_count(),
        store_keys=store.num_keys(),
    )


def growth(soaked: Soaked) -> dict[str, int]:
    """From half of the way to the end."""
    first, last = soaked.samples[len(soaked.samples) // 2], soaked.samples[-1]
    before, after = asdict(first), asdict(last)
    return {name: after[name] - before[name] for name in before if name != "step"}
