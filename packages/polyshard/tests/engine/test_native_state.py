"""Optimizer state is saved in the layout of the saved parameter, and loads without the plugin."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from toy_adapters import Adapting
from toy_models import Model, build, full, loss_of, shard, tokens_for
from toy_transforms import Transposing

from polyshard import Plugin, attach_optimizer, fully_shard, hookimpl
from polyshard.engine.state_dict import native_state
from polyshard.errors import (
    CheckpointError,
    IneffectiveSettingWarning,
    LifecycleError,
    SettingError,
)
from polyshard.plugins.seams import GroupInfo, ParamInfo, StateDictAdapter
from polyshard_testing import World, ranks

SIZES = {"width": 12, "hidden": 27, "layers": 2}
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
}


class Untransposing(StateDictAdapter):
    """Saves a parameter as its module knows it."""

    name = "untransposing"
    settings = ""

    def on_save(self, param: ParamInfo, value: Tensor) -> Tensor:
        return value.transpose(0, -1) if value.ndim > 1 else value

    on_load = on_save


class NativeTransposing(Transposing):
    """Shards matrices transposed, and keeps checkpoints native."""

    name = "native_transposing"

    @hookimpl
    def polyshard_state_dict_adapter(self, group: GroupInfo) -> Untransposing:
        return Untransposing()


def sharded(seed: int, *, transposed: bool) -> Model:
    plugins = [NativeTransposing()] if transposed else []
    return shard(build(seed, **SIZES), fully_shard, plugins=plugins)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int]) -> list[float]:
    """Every rank sees the same tokens, so any number of ranks trains alike."""
    losses = []
    for step in steps:
        loss = loss_of(model, tokens_for(step, 0))
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def alone(kind: str) -> tuple[Model, torch.optim.Optimizer, list[float]]:
    """One process: the model and its optimizer after three steps, and losses of five."""
    model = build(1, **SIZES)
    optimizer = KINDS[kind](model.parameters())
    losses = run(model, optimizer, range(3))
    kept, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    losses += run(model, optimizer, range(3, 5))
    again = KINDS[kind](kept.parameters())
    again.load_state_dict(state)
    return kept, again, losses


def assert_native(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> None:
    """What ``optimizer`` saves is what one process would save, tensor by tensor."""
    reference, expected, _ = alone(kind)
    found, wanted = optimizer.state_dict()["state"], expected.state_dict()["state"]
    assert found.keys() == wanted.keys()
    for (index, state), (name, parameter) in zip(
        wanted.items(), reference.named_parameters(), strict=True
    ):
        assert found[index].keys() == state.keys()
        for key, value in state.items():
            same = full(found[index][key])
            assert same.shape == (value.shape if value.ndim == 0 else parameter.shape), (name, key)
            torch.testing.assert_close(same, value, rtol=1e-4, atol=1e-7)


def saves(rank: int, size: int, folder: str, kind: str, transposed: bool) -> None:
    model = sharded(1, transposed=transposed)
    optimizer = KINDS[kind](model.parameters())
    run(model, optimizer, range(3))
    assert_native(model, optimizer, kind)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def loads(rank: int, size: int, folder: str, kind: str, transposed: bool) -> None:
    """Before its first step; then it trains on as one process does."""
    model = sharded(7, transposed=transposed)
    optimizer = KINDS[kind](model.parameters())
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert_native(model, optimizer, kind)
    for parameter in model.parameters():
        for value in optimizer.state[parameter].values():
            assert value.ndim == 0 or value.shape == parameter.shape
            if isinstance(value, DTensor) and isinstance(parameter, DTensor):
                assert value.placements == parameter.placements
                assert value.to_local().is_contiguous()
    _, _, losses = alone(kind)
    torch.testing.assert_close(run(model, optimizer, range(3, 5)), losses[3:], rtol=1e-5, atol=0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saver", [True, False], ids=["from plugin", "to plugin"])
def test_checkpoints_load_with_and_without_the_plugin(
    world2: World, world3: World, tmp_path: Path, saver: bool, kind: str
) -> None:
    world2.run(saves, str(tmp_path), kind, saver)
    for world in (world2, world3):
        for loader in (True, False):
            world.run(loads, str(tmp_path), kind, loader)


def distributed(source: nn.Module, target: nn.Module) -> dict[str, Tensor]:
    """Values of ``source`` placed as in the state dict of ``target``."""
    values, places = source.state_dict(), target.state_dict()
    return {
        name: distribute_tensor(value, places[name].device_mesh, places[name].placements)
        for name, value in values.items()
    }


def full_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
    """As torch's helpers give it in one process: by name."""
    return get_state_dict(model, optimizer)[1]


@pytest.mark.parametrize("kind", KINDS)
@ranks(2)
def test_full_state_dicts(rank: int, size: int, kind: str) -> None:
    """Full state dicts on the host, and from rank 0, by torch's helpers."""
    reference, expected, losses = alone(kind)
    model = sharded(1, transposed=True)
    optimizer = KINDS[kind](model.parameters())
    run(model, optimizer, range(3))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    _, state = get_state_dict(model, optimizer, options=options)
    if rank == 0:
        wanted = {n: expected.state[p] for n, p in reference.named_parameters()}
        found: Any = state["state"]
        for name, values in wanted.items():
            for key, value in values.items():
                torch.testing.assert_close(found[name][key], value.cpu(), rtol=1e-4, atol=1e-7)
    for transposed in (True, False):
        for from_rank_0 in (True, False):
            other = sharded(7, transposed=transposed)
            other.load_state_dict(distributed(reference, other))
            theirs = KINDS[kind](other.parameters())
            given = state if from_rank_0 else full_state(expected, reference)
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
            set_optimizer_state_dict(other, theirs, copy.deepcopy(given), options=options)
            found_losses = run(other, theirs, range(3, 5))
            torch.testing.assert_close(found_losses, losses[3:], rtol=1e-5, atol=0)


# Without torch's helpers -------------------------------------------------------------------------


@ranks(2)
def test_optimizers_by_themselves(rank: int, size: int) -> None:
    model = sharded(1, transposed=True)
    optimizer = KINDS["AdamW"](model.parameters())
    run(model, optimizer, range(3))
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    saved = copy.deepcopy(optimizer.state_dict())
    live = optimizer.state[model.head.weight]["exp_avg"].full_tensor()
    assert live.shape == model.head.weight.shape == (SIZES["width"], 101)
    expected = run(model, optimizer, range(3, 5))

    model.load_state_dict(weights)
    optimizer.load_state_dict(copy.deepcopy(saved))  # after its first step
    assert run(model, optimizer, range(3, 5)) == expected

    other = sharded(7, transposed=True)
    other.load_state_dict(weights)
    theirs = KINDS["AdamW"](other.parameters())
    attach_optimizer(theirs)
    attach_optimizer(theirs)  # twice is once
    theirs.load_state_dict(copy.deepcopy(saved))
    assert run(other, theirs, range(3, 5)) == expected

    late = KINDS["AdamW"](other.parameters())
    late.load_state_dict(copy.deepcopy(saved))
    with pytest.raises(LifecycleError, match=r"AdamW has state for .*'head\.weight'.*before its"):
        run(other, late, range(1))
    late.zero_grad()
    attach_optimizer(late)
    late.load_state_dict(copy.deepcopy(saved))
    other.load_state_dict(weights)
    assert run(other, late, range(3, 5)) == expected


@ranks(2)
def test_full_values_pass_through_an_adapter(rank: int, size: int) -> None:
    """Full values are in the saved form, square or not; a parameter itself is not."""
    options = StateDictOptions(full_state_dict=True)
    for columns, rows in ((4, 4), (4, 6), (5, 3)):
        model: Any = nn.Sequential(nn.Linear(columns, rows, bias=False))
        fully_shard(model, plugins=[NativeTransposing()])
        given = torch.arange(float(rows * columns)).view(rows, columns)
        set_model_state_dict(model, {"0.weight": given.clone()}, options=options)
        x = torch.eye(columns)
        assert torch.equal(model(x).detach(), given.t())
        model.reshard()
        assert torch.equal(full(model.state_dict()["0.weight"]), given)
        model.load_state_dict(model.state_dict())
        assert torch.equal(model(x).detach(), given.t())
        model.reshard()
        with pytest.raises(CheckpointError, match=r"'0\.weight' cannot be loaded from itself"):
            model.load_state_dict({"0.weight": model[0].weight.detach()})


@ranks(2)
def test_state_in_the_plugins_form_is_refused(rank: int, size: int) -> None:
    """State that was saved in the plugin's form is noticed where shapes tell."""
    model = sharded(1, transposed=True)
    optimizer = KINDS["AdamW"](model.parameters())
    run(model, optimizer, range(1))
    state = {i: optimizer.state[p] for i, p in enumerate(model.parameters())}
    raw = {**optimizer.state_dict(), "state": state}
    with pytest.raises(CheckpointError, match=r"'exp_avg' of '.*weight' has the shape"):
        optimizer.load_state_dict(raw)


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(SettingError, match=r"takes a torch\.optim\.Optimizer, got int"):
        attach_optimizer(3)  # type: ignore[arg-type]


def test_other_optimizers_are_left_alone() -> None:
    native_state()
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    for _ in range(2):
        parameter.grad = torch.ones(3)
        optimizer.step()
    assert not optimizer._optimizer_state_dict_post_hooks


# What cannot follow ------------------------------------------------------------------------------


class Rows(torch.optim.Optimizer):
    """Keeps a number for each row, as memory-saving optimizers do, and a nested one like the
    parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["rows"] = p.grad.square().sum(-1)
                state["inner"] = {"whole": p.grad.clone(), "count": 3}
                p.sub_(p.grad, alpha=group["lr"])


@ranks(2)
def test_state_of_another_shape_is_left_and_said(rank: int, size: int) -> None:
    model = sharded(1, transposed=True)
    optimizer = Rows([model.head.weight])
    loss_of(model, tokens_for(0, 0)).backward()
    optimizer.step()
    with pytest.warns(IneffectiveSettingWarning, match=r"'rows' of 'head\.weight'.*same plugins"):
        (state,) = optimizer.state_dict()["state"].values()
    shape = tuple(model.head.weight.shape)
    assert state["rows"].shape == (shape[0],)
    assert state["inner"]["whole"].shape == shape[::-1]
    assert state["inner"]["count"] == 3


class Halving(StateDictAdapter):
    """Saves half of a parameter, and knows that its gradients are twice as large then."""

    name = "halving"
    settings = ""

    def on_save(self, param: ParamInfo, value: Tensor) -> Tensor:
        return value / 2

    def on_load(self, param: ParamInfo, value: Tensor) -> Tensor:
        return value * 2

    def on_save_state(self, param: ParamInfo, name: str, value: Tensor) -> Tensor:
        return value * {"exp_avg": 2, "exp_avg_sq": 4}[name]

    def on_load_state(self, param: ParamInfo, name: str, value: Tensor) -> Tensor:
        return value / {"exp_avg": 2, "exp_avg_sq": 4}[name]


class Halves(Plugin):
    name = "halves"

    @hookimpl
    def polyshard_state_dict_adapter(self, group: GroupInfo) -> Halving:
        return Halving()


@ranks(2)
def test_adapters_that_change_values(rank: int, size: int) -> None:
    """An adapter that changes values says what becomes of state, or state stays, with a warning."""
    trained = []
    for plugin in (None, Halves(), Adapting()):
        model = shard(build(1, **SIZES), fully_shard, plugins=[plugin] if plugin else [])
        optimizer = KINDS["AdamW"](model.parameters())
        run(model, optimizer, range(2))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            saved = copy.deepcopy(optimizer.state_dict())
        said = [str(w.message) for w in caught]
        assert any("of 'negating' changes values" in s for s in said) is isinstance(
            plugin, Adapting
        )
        expected = run(model, optimizer, range(2, 4))
        trained.append((saved["state"], expected))
        model.load_state_dict(model.state_dict())
        optimizer.load_state_dict(saved)
        again = optimizer.state_dict()["state"]
        for index, state in saved["state"].items():
            assert all(torch.equal(full(again[index][k]), full(v)) for k, v in state.items())
    for index, state in trained[0][0].items():
        for name, factor in (("exp_avg", 2), ("exp_avg_sq", 4)):
            value = full(state[name])
            assert torch.equal(full(trained[1][0][index][name]), value * factor)
            assert torch.equal(full(trained[2][0][index][name]), value)


class TransposingNegated(StateDictAdapter):
    """Changes the layout and, without saying what becomes of state, the values."""

    name = "transposing_negated"
    settings = ""

    def on_save(self, param: ParamInfo, value: Tensor) -> Tensor:
        return -value.transpose(0, -1) if value.ndim > 1 else -value

    on_load = on_save


class TransposesNegated(Plugin):
    name = "transposes_negated"

    @hookimpl
    def polyshard_state_dict_adapter(self, group: GroupInfo) -> TransposingNegated:
        return TransposingNegated()


@ranks(2)
def test_ranks_without_rows_save_state_as_the_others_do(rank: int, size: int) -> None:
    """One that has no element of a parameter cannot see that its values change."""
    model = fully_shard(nn.Linear(4, 1), plugins=[TransposesNegated()])
    optimizer = KINDS["AdamW"](model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with pytest.warns(IneffectiveSettingWarning, match="changes values"):
        saved = optimizer.state_dict()["state"]
    assert [tuple(state["exp_avg"].shape) for state in saved.values()] == [(1, 4), (1,)]
