"""Sharded parameters save, load, pickle and copy on their own, as FSDP2's do."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from toy_models import build, full, loss_of, shard, tokens_for

from polyshard import fully_shard
from polyshard_testing import World, ranks


class Odd(nn.Module):
    """Parameters that some rank holds none of, and (for polyshard) one of no dims."""

    def __init__(self, with_scalar: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.short = nn.Parameter(torch.randn(2, 5))
        self.row = nn.Parameter(torch.randn(1, 700))
        self.large = nn.Linear(64, 65)
        self.none = nn.Parameter(torch.empty(0, 3))
        if with_scalar:
            self.scalar = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        scale: Any = getattr(self, "scalar", 3.0)
        out: Tensor = self.large(x).sum() * scale + self.short.sum() + self.row.square().sum()
        return out + self.none.sum()


def engine_of(name: str) -> Any:
    return fully_shard if name == "polyshard" else torch_fully_shard


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def locals_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.to_local().clone() for name, value in state.items()}


def assert_same_locals(ours: dict[str, Any], expected: dict[str, Tensor]) -> None:
    assert list(ours) == list(expected)
    for name, value in ours.items():
        assert isinstance(value, DTensor)
        assert torch.equal(value.to_local(), expected[name]), name


def ways(rank: int, size: int, engine: str, with_scalar: bool) -> dict[str, int]:
    """Every way to save or copy; returns the bytes of what was saved, by name."""
    model = engine_of(engine)(Odd(with_scalar))
    with torch.no_grad():  # torch's engine reduces no empty gradients
        model(torch.ones(2, 64))
    state = model.state_dict()
    expected = locals_of(state)
    assert_same_locals(torch.load(io.BytesIO(saved(state)), weights_only=True), expected)
    assert_same_locals(pickle.loads(pickle.dumps(state)), expected)
    copied = copy.deepcopy(state)
    assert_same_locals(copied, expected)
    for name, parameter in model.named_parameters():
        twin = copy.deepcopy(parameter)
        assert type(twin) is type(parameter)
        with torch.no_grad():
            parameter.zero_()
        assert torch.equal(twin.to_local(), expected[name]), "memory of its own"
        assert torch.equal(copied[name].to_local(), expected[name])
    return {name: len(saved(value)) for name, value in state.items()}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_saving_and_copying(world1: World, world2: World, world3: World, size: int) -> None:
    world = (world1, world2, world3)[size - 1]
    theirs = world.run(ways, "torch", False)
    ours = world.run(ways, "polyshard", False)
    for mine, reference in zip(ours, theirs, strict=True):
        for name, nbytes in mine.items():
            assert nbytes <= reference[name] + 64, f"'{name}' carries more than itself"
    world.run(ways, "polyshard", True)


@ranks(1, 3)
def test_parameters_and_gradients_have_storages_of_their_own(rank: int, size: int) -> None:
    """What torch saves of a tensor is its storage: exactly the local rows."""
    model = shard(build(width=24, hidden=30), fully_shard)
    for _ in range(2):
        loss_of(model, tokens_for(0, rank)).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            for value in (parameter, parameter.grad):
                local: Any = value.to_local()  # type: ignore[attr-defined]
                assert local.storage_offset() == 0, name
                assert local.untyped_storage().nbytes() == local.nbytes, name
            again = torch.load(io.BytesIO(saved(parameter.grad)), weights_only=True)
            assert torch.equal(again.to_local(), parameter.grad.to_local())  # type: ignore[attr-defined]
            assert torch.equal(full(copy.deepcopy(parameter.grad)), full(parameter.grad))
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@ranks(2)
def test_asynchronous_checkpoints(rank: int, size: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    model, reference = shard(build(1, hidden=251), fully_shard), build(1, hidden=251)
    state: dict[str, Any] = dict(get_model_state_dict(model))
    future: Any = dcp.async_save({"model": state}, checkpoint_id=folder)
    future.result()
    other = shard(build(2, hidden=251), fully_shard)
    target: dict[str, Any] = dict(get_model_state_dict(other))
    dcp.load({"model": target}, checkpoint_id=folder)
    for name, value in reference.state_dict().items():
        assert torch.equal(full(target[name]), value), name
        live: Any = dict(other.named_parameters())[name]
        assert torch.equal(full(live.detach()), value), "loaded in place"


@ranks(2)
def test_every_option_of_a_state_dict(rank: int, size: int) -> None:
    model = shard(build(1), fully_shard)
    reference = {n: v.cpu() for n, v in build(1).state_dict().items()}
    theirs = shard(build(1), torch_fully_shard)
    for whole in (False, True):
        for on_host in (False, True):
            chosen = StateDictOptions(full_state_dict=whole, cpu_offload=on_host)
            ours: dict[str, Any] = dict(get_model_state_dict(model, options=chosen))
            expected: dict[str, Any] = dict(get_model_state_dict(theirs, options=chosen))
            assert list(ours) == list(expected)
            for name, value in ours.items():
                assert type(value) is type(expected[name])
                assert torch.equal(full(value).cpu(), reference[name]), (whole, on_host, name)
            again = torch.load(io.BytesIO(saved(ours)), weights_only=True)
            assert all(torch.equal(full(v).cpu(), reference[n]) for n, v in again.items())
