"""Saving what is left when a rank was killed."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from toy_meeting import await_all
from toy_models import build, full
from toy_runs import Job, assert_equal, whole

from polyshard.errors import CheckpointError, PeerError
from polyshard_checkpoint import Checkpoints, checkpoints_in, survivors
from polyshard_checkpoint.manifest import Manifest
from polyshard_checkpoint.survivors import Survivors
from polyshard_testing import World, ranks
from polyshard_testing.world import RankError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

DEAD = 3


def one_dies(world: World, run: Callable[..., None], *args: Any) -> None:
    """Run on all ranks, of which the last kills itself."""
    with pytest.raises(RankError) as caught:
        world.run(run, *args)
    text = str(caught.value)
    assert text.count("--- rank") == 1, text
    assert "the process ended without an answer" in text


def train_and_kill(rank: int, size: int, folder: str, kind: str) -> None:
    """Two steps; rank 3 dies; the others save what is left, as ``kind`` says."""
    sharding: dict[str, Any] = {}
    if kind.startswith("hsdp"):
        sharding["mesh"] = init_device_mesh(
            torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
        )
    job = Job.start(rank, size, **sharding)
    model: Any = job.model
    job.train(2, drop=False)
    weights = whole(job.model)
    state = [full(v) for s in job.optimizer.state.values() for v in s.values() if v.ndim]
    if rank == 0:
        torch.save((weights, state), f"{folder}/wanted.pt")
    await_all("saved", size)
    if rank == DEAD:
        os.kill(os.getpid(), signal.SIGKILL)
    checkpoints = Checkpoints(f"{folder}/run")
    left = [0, 1, 2]
    if kind == "hsdp":
        with pytest.raises(PeerError, match="rank 3 is gone"):
            job.train(1)
        assert set(job.model.state_dict()) == set(weights)
        model.reset_iter_state()
        assert set(job.model.state_dict()) == set(weights)
        checkpoints.save_survivors(2, job.state)
    elif kind == "hsdp at different steps":
        with pytest.raises(CheckpointError, match=r"differ in the completed step .*rank 2: 1\)"):
            checkpoints.save_survivors(1 if rank == 2 else 2, job.state, ranks=left)
        checkpoints.save_survivors(2, job.state, ranks=left)
    else:
        pattern = (
            r"ranks \[3\] held shards that no other rank has: "
            r"model\.embedding\.weight \[101, 20\] lacks \[78:101\] of dim 0; .*and \d+ more\. Load"
        )
        with pytest.raises(CheckpointError, match=pattern):
            checkpoints.save_survivors(2, job.state, ranks=left)
        assert not list(Path(f"{folder}/run").glob("*step*"))
        path = checkpoints.save_survivors(2, job.state, ranks=left, partial=True)
        assert path.name == "partial-step-000002"
    end = time.monotonic() + 10
    while list(Path(f"{folder}/run").glob(".*")):  # one of them tidies up, when all have left
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def world() -> Iterator[World]:
    made = World(4, collective_seconds=10.0)
    yield made
    made.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["hsdp", "hsdp at different steps"])
def test_replicas_make_a_complete_checkpoint(
    world: World, world3: World, tmp_path: Path, kind: str
) -> None:
    one_dies(world, train_and_kill, str(tmp_path), kind)
    (path,) = checkpoints_in(tmp_path / "run")
    assert path.name == "step-000002"
    world3.run(loads_at_another_size, str(tmp_path))
    weights, moments = torch.load(tmp_path / "wanted.pt", weights_only=True)
    plain = build(5, width=20, hidden=30, layers=2)
    optimizer = torch.optim.AdamW(plain.parameters())
    found, state = get_state_dict(plain, optimizer)
    dcp.load({"model": found, "optimizer": state}, checkpoint_id=path)
    set_state_dict(plain, optimizer, model_state_dict=found, optim_state_dict=state)
    assert_equal(dict(plain.named_parameters()), weights)
    loaded = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
    assert_equal(loaded, moments)


def loads_at_another_size(rank: int, size: int, folder: str) -> None:
    weights, _ = torch.load(f"{folder}/wanted.pt", weights_only=True)
    job = Job.start(rank, size, seed=7)
    restored = Checkpoints(f"{folder}/run").load(job.state)
    assert restored is not None
    assert restored.step == 2
    assert_equal(whole(job.model), weights)
    job.train(1)


def test_what_is_missing_is_said_and_refused(world: World, tmp_path: Path) -> None:
    one_dies(world, train_and_kill, str(tmp_path), "fsdp")
    folder = tmp_path / "run"
    assert checkpoints_in(folder) == []
    missing = Manifest.read(folder / "partial-step-000002").missing
    assert "model.embedding.weight [101, 20] lacks [78:101] of dim 0" in missing
    names = {line.split()[0] for line in missing}
    model = build(5, width=20, hidden=30, layers=2)
    assert {f"model.{name}" for name, _ in model.named_parameters()} <= names
    job_less = Checkpoints(folder)
    assert job_less.load(_state()) is None
    with pytest.raises(CheckpointError, match=r"the state of some ranks only: .*lacks"):
        job_less.load(_state(), folder / "partial-step-000002")


def _state() -> Any:
    from polyshard_checkpoint import TrainingState

    return TrainingState(build(5, width=20, hidden=30, layers=2))


@ranks(2)
def test_refusals(rank: int, size: int, tmp_path: Path) -> None:
    job = Job.start(rank, size)
    for others in ([1 - rank], [rank, 5]):
        with pytest.raises(CheckpointError, match="which calls this, one of them"):
            Checkpoints(tmp_path).save_survivors(1, job.state, ranks=others)


def test_without_a_process_group(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="needs the process group"):
        Checkpoints(tmp_path).save_survivors(1, _state())


@ranks(2)
def test_all_that_are_left_may_be_all(rank: int, size: int, tmp_path: Path) -> None:
    """No rank died: a save like any other, without a collective."""
    job = Job.start(rank, size)
    job.train(1)
    for again in range(2):
        path = Checkpoints(tmp_path).save_survivors(1 + again, job.state)
    other = Job.start(rank, size, seed=4)
    restored = Checkpoints(tmp_path).load(other.state)
    assert restored is not None
    assert restored.path == path
    assert restored.notes == ()
    found, wanted = other.everything(), job.everything()
    assert_equal(found | {"random": 0}, wanted | {"random": 0})  # both draw from one generator


@ranks(2)
def test_a_rank_that_fails_is_quoted(rank: int, size: int, tmp_path: Path) -> None:
    job = Job.start(rank, size)
    job.train(1)

    def full(progress: object) -> None:
        if rank == 1:
            raise OSError("No space left on device")

    with pytest.raises(CheckpointError, match=r"failed\. rank 1: .*No space left"):
        Checkpoints(tmp_path, progress=full).save_survivors(1, job.state)
    assert not list(tmp_path.glob("*step*"))


@ranks(2)
def test_what_a_job_left_that_was_killed_while_it_saved(
    rank: int, size: int, tmp_path: Path
) -> None:
    """A job of the same address and ranks saves another step; rank 0 comes last."""
    job = Job.start(rank, size)
    with mock.patch.object(survivors, "_calls", return_value=Counter()):
        old = Survivors.of(tmp_path, None)
    if rank == 0:
        old._place.mkdir(0o700)
        for number in range(1, 4):
            old._number = number
            for other in range(size):
                old._file("says", other).write_bytes(pickle.dumps(5))
        old._number = 0
        old._file("greets", 1).write_bytes(b"of the old job")
        old._beside(1).write_bytes(b"of the old job")
    await_all("left", size)
    with mock.patch.object(survivors, "_calls", return_value=Counter()):
        if rank == 0:
            while old._beside(1).read_bytes() == b"of the old job":
                time.sleep(0.01)
        path = Checkpoints(tmp_path).save_survivors(8, job.state)
    assert path.name == "step-000008"
    await_all("saved", size)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
