"""A run that is saved and resumed is the run that was not interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from toy_models import build
from toy_runs import Job, assert_equal, whole

from polyshard_checkpoint import Checkpoints, Restored, TrainingState
from polyshard_testing import World, ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def save(checkpoints: Checkpoints, step: int, job: Job, *, later: bool) -> Path:
    if not later:
        return checkpoints.save(step, job.state)
    saving = checkpoints.save_async(step, job.state)
    job.train(1)  # must not be seen in what is saved
    return saving.wait()


@pytest.mark.sampled(2)
@ranks(1, 2, 3)
@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
def test_resuming_is_bitwise_the_undisturbed_run(
    rank: int, size: int, tmp_path: Path, later: bool
) -> None:
    undisturbed = Job.start(rank, size)
    undisturbed.train(3)
    losses, wanted = undisturbed.train(3), undisturbed.everything()

    first = Job.start(rank, size)
    first.train(3)
    with Checkpoints(tmp_path) as checkpoints:
        path = save(checkpoints, 3, first, later=later)

    second = Job.start(rank, size, seed=7)
    restored = Checkpoints(tmp_path).load(second.state)
    assert restored == Restored(3, path)
    assert second.train(3) == losses
    assert_equal(second.everything(), wanted)


def hybrid(size: int) -> dict[str, Any]:
    return {
        "mesh": init_device_mesh(
            torch.get_default_device().type, (2, size // 2), mesh_dim_names=("r", "s")
        )
    }


def plain(size: int) -> dict[str, DeviceMesh]:
    return {"mesh": init_device_mesh(torch.get_default_device().type, (size,))}


def save_at(rank: int, size: int, folder: Path, replicas: bool) -> None:
    job = Job.start(rank, size, **(hybrid if replicas else plain)(size))
    job.train(2, drop=False)
    Checkpoints(folder).save(2, job.state)
    if rank == 0:
        torch.save(
            ({n: w.cpu() for n, w in whole(job.model).items()}, job.samples.drawn),
            folder / "expected.pt",
        )
    else:
        whole(job.model)


def load_at(rank: int, size: int, folder: Path, replicas: bool, same: bool) -> None:
    job = Job.start(rank, size, seed=3, **(hybrid if replicas else plain)(size))
    drawn = torch.rand(1)
    torch.manual_seed(300 + rank)
    restored = Checkpoints(folder).load(job.state)
    weights, samples = torch.load(folder / "expected.pt")
    assert_equal(whole(job.model), weights)
    assert job.samples.drawn == samples
    assert job.scheduler.last_epoch == 2
    assert restored is not None
    assert bool(restored.notes) is not same
    if not same:
        words = " ".join(restored.notes)
        assert all(name in words for name in ("meter", "random", "plugins"))
        assert job.meter.seen == 0
        assert torch.equal(torch.rand(1), drawn), "generators were left as they were"
    job.train(1, drop=False)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("after", ["1", "2", "3", "4", "4h"])
@pytest.mark.parametrize("before", ["1", "2", "3", "4", "4h"])
def test_saved_at_one_world_size_loaded_at_another(
    request: pytest.FixtureRequest, tmp_path: Path, before: str, after: str
) -> None:
    old: World = request.getfixturevalue(f"world{before[0]}")
    new: World = request.getfixturevalue(f"world{after[0]}")
    old.run(save_at, tmp_path, "h" in before)
    new.run(load_at, tmp_path, "h" in after, before[0] == after[0])


def test_plain_torch_loads_it(world2: World, tmp_path: Path) -> None:
    world2.run(save_at, tmp_path, False)
    model = build(5, width=20, hidden=30, layers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    weights, moments = get_state_dict(model, optimizer)
    (folder,) = tmp_path.glob("step-*")
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"])
    assert_equal(whole(model), torch.load(tmp_path / "expected.pt")[0])
    assert optimizer.param_groups[0]["lr"] == 5e-3, "halved by the scheduler after two steps"
    assert all(state["step"] == 2 for state in optimizer.state.values())


@ranks(2)
def test_weights_alone_load_from_a_whole_run(rank: int, size: int, tmp_path: Path) -> None:
    job = Job.start(rank, size)
    job.train(1)
    Checkpoints(tmp_path).save(1, job.state)
    other = Job.start(rank, size, seed=2)
    Checkpoints(tmp_path).load(TrainingState(other.model, random=False))
    assert_equal(whole(other.model), whole(job.model))
    assert not other.optimizer.state


def test_without_torch_distributed(tmp_path: Path) -> None:
    model, other = build(0), build(1)
    Checkpoints(tmp_path).save(4, TrainingState(model))
    restored = Checkpoints(tmp_path).load(TrainingState(other))
    assert restored is not None
    assert restored.step == 4
    assert_equal(whole(other), whole(model))


def test_a_run_without_checkpoints_starts_fresh(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none").load(TrainingState(build())) is None
    assert not list(tmp_path.iterdir())
