"""Checkpoints that were written to harm the process that loads them."""

from __future__ import annotations

import enum
import io
import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from toy_models import assert_same_parameters, build, shard
from toy_pickles import Call, make

from polyshard import fully_shard
from polyshard.errors import CheckpointError
from polyshard_checkpoint import CheckpointPlanner, CheckpointReader
from polyshard_testing import ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def saved(folder: Path, **more: Any) -> Path:
    """A checkpoint of a few tensors and plain values."""
    state = {"weight": torch.arange(6.0), "lr": 0.5, "betas": (0.9, 0.95), **more}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def load(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    reader, planner = CheckpointReader(folder), CheckpointPlanner()
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    return state


def test_honest_checkpoints_load(tmp_path: Path) -> None:
    found = load(saved(tmp_path), {"weight": torch.zeros(6), "lr": 0.0, "betas": ()})
    assert found["weight"].tolist() == list(range(6))
    assert (found["lr"], found["betas"]) == (0.5, (0.9, 0.95))


def payloads(victim: Path) -> dict[str, Any]:
    return {
        "plain": Call(make, victim),
        "builtin": Call(eval, f"__import__('pathlib').Path({str(victim)!r}).touch()"),
        "system": Call(os.system, f"touch {victim}"),
        "torch": Call(torch.save, [1], str(victim)),
        "inside": Metadata({}, planner_data=Call(make, victim), storage_data={}),
    }


@pytest.mark.parametrize("kind", payloads(Path()))
def test_metadata_runs_nothing(tmp_path: Path, kind: str) -> None:
    victim, folder = tmp_path / "pwned", saved(tmp_path / "saved")
    (folder / ".metadata").write_bytes(pickle.dumps(payloads(victim)[kind]))
    with pytest.raises(CheckpointError, match=r"saved/\.metadata.*it names \w+[\w.]*\..*Nothing"):
        CheckpointReader(folder)
    assert not victim.exists()
    with suppress(BaseException):
        dcp.load({"weight": torch.zeros(6)}, checkpoint_id=folder, no_dist=True)
    assert victim.exists(), "torch's own reader would have run it"


class EarlyPickler(pickle.Pickler):
    """As Python 3.11.0 to 3.11.3 writes members of enumerations."""

    def reducer_override(self, obj: object) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


def test_members_of_enumerations_are_found_by_attribute(tmp_path: Path) -> None:
    folder, written = saved(tmp_path), io.BytesIO()
    EarlyPickler(written).dump(pickle.loads((folder / ".metadata").read_bytes()))
    assert b"getattr" in written.getvalue()
    (folder / ".metadata").write_bytes(written.getvalue())
    assert load(folder, {"weight": torch.zeros(6)})["weight"].tolist() == list(range(6))


def test_other_attributes_are_not_taken(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    content = Metadata({}, planner_data=Call(getattr, Metadata, "__init__"), storage_data={})
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match="no member of an enumeration"):
        CheckpointReader(folder)


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps(3), pickle.dumps(Metadata({}))])
def test_damaged_metadata_is_an_error(tmp_path: Path, content: bytes) -> None:
    folder = saved(tmp_path)
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be trusted"):
        CheckpointReader(folder)


def test_nothing_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"FileNotFoundError.*\.metadata"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("place", ["/etc/passwd", "../other", "a/../../b"])
def test_tensors_are_in_the_checkpoint(tmp_path: Path, place: str) -> None:
    folder = saved(tmp_path)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = place
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"outside of the checkpoint"):
        CheckpointReader(folder)


def test_values_that_are_no_tensors_run_nothing(tmp_path: Path) -> None:
    """Under a name that the loader knows as a tensor as well: metadata says what is what."""
    victim, folder = tmp_path / "pwned", saved(tmp_path / "saved")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    evil = io.BytesIO()
    torch.save(Call(make, victim), evil)
    (folder / "evil.distcp").write_bytes(evil.getvalue())
    for index, place in metadata.storage_data.items():
        if index.fqn == "weight":
            place.relative_path, place.offset, place.length = "evil.distcp", 0, evil.tell()
    metadata.state_dict_metadata["weight"] = BytesStorageMetadata()
    metadata.storage_data = {
        (type(index)(index.fqn) if index.fqn == "weight" else index): place
        for index, place in metadata.storage_data.items()
    }
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    state = {"weight": torch.zeros(6)}
    with pytest.raises(BaseException, match="'weight' of the checkpoint is not plain data"):
        load(folder, state)
    assert not victim.exists()


# On ranks --------------------------------------------------------------------------------------


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


@ranks(2)
def test_sharded_checkpoints(rank: int, size: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    model = shard(build(1), fully_shard)
    optimizer = torch.optim.AdamW(model.parameters())
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    other = shard(build(2), fully_shard)
    state = state_of(other, torch.optim.AdamW(other.parameters()))
    dcp.load(state, storage_reader=CheckpointReader(folder), planner=CheckpointPlanner())
    other.load_state_dict(state["model"])
    assert_same_parameters(other, model, exact=True)
