"""Optimizers in every state a run may have them in: what is resumed is what was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from toy_models import build, full, loss_of, shard, tokens_for
from toy_runs import assert_equal, whole

from polyshard import fully_shard
from polyshard.errors import CheckpointError, SettingError
from polyshard_checkpoint import Checkpoints, TrainingState
from polyshard_testing import ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

Make = Callable[[nn.Module], list[torch.optim.Optimizer]]


def of_all(kind: Any, **settings: Any) -> Make:
    return lambda model: [kind(model.parameters(), **settings)]


def grouped(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": others, "lr": 0.3}, {"params": matrices, "weight_decay": 0.2}]
    return [torch.optim.AdamW(groups, lr=torch.tensor(0.1), amsgrad=True, foreach=False)]


def several(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, *rest = model.parameters()
    return [torch.optim.SGD([first], 0.1, momentum=0.9), torch.optim.Adam(rest, 0.01)]


def partial(model: nn.Module) -> list[torch.optim.Optimizer]:
    """One that never gets a gradient, and one that is frozen and in none."""
    *used, frozen = model.parameters()
    frozen.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(3))
    return [torch.optim.Adam([*used, model.unused], 0.01)]


MAKES: dict[str, Make] = {
    "adam with weight decay": of_all(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    "sgd": of_all(torch.optim.SGD, lr=0.1),
    "dampened": of_all(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "nadam": of_all(torch.optim.NAdam, lr=0.01),
    "adagrad": of_all(torch.optim.Adagrad, lr=0.01),
    "groups": grouped,
    "several": several,
    "partial": partial,
}


class Run:
    def __init__(self, make: Make, rank: int, seed: int = 0) -> None:
        self.model = build(seed, width=6, hidden=5, layers=1)
        if dist.is_initialized():
            shard(self.model, fully_shard)
        self.optimizers, self.rank = make(self.model), rank

    def train(self, *steps: int) -> None:
        for step in steps:
            loss_of(self.model, tokens_for(step, self.rank)).backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    @property
    def state(self) -> TrainingState:
        return TrainingState(self.model, self.optimizers)

    def everything(self) -> Any:
        states = [o.state_dict()["state"] for o in self.optimizers]
        return whole(self.model), [
            {
                k: {n: full(v).clone() for n, v in s.items() if v is not None}
                for k, s in every.items()
            }
            for every in states
        ]


@pytest.mark.sampled(5)
@ranks(2)
@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize("done", [0, 2])
def test_resuming_is_the_undisturbed_run(
    rank: int, size: int, tmp_path: Path, kind: str, done: int
) -> None:
    """Before the first step as well, when there is no state, and saving is not to make any."""
    undisturbed, first, second = (Run(MAKES[kind], rank, seed) for seed in (0, 0, 1))
    undisturbed.train(*range(done))
    first.train(*range(done))
    Checkpoints(tmp_path).save(done, first.state)
    Checkpoints(tmp_path).load(second.state)
    for run in (undisturbed, first, second):
        run.train(done, done + 1)
    for run in (first, second):
        found, wanted = run.everything(), undisturbed.everything()
        assert_equal(found, wanted)


class Scaled(nn.Module):
    """Has a parameter without dims, which one rank has and others have nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.scale
        return y


SCALARS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "asgd": torch.optim.ASGD,
    "adagrad": torch.optim.Adagrad,
}


@ranks(2)
@pytest.mark.parametrize("kind", SCALARS)
def test_state_of_a_parameter_without_dims(rank: int, size: int, tmp_path: Path, kind: str) -> None:
    def made() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = fully_shard(Scaled())
        return model, SCALARS[kind](model.parameters(), lr=0.1)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.full((2, 3), 1.0 + rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    (first, optimizer), (second, other) = made(), made()
    train(first, optimizer)
    Checkpoints(tmp_path).save(1, TrainingState(first, [optimizer]))
    Checkpoints(tmp_path).load(TrainingState(second, [other]))
    for model, steps in ((first, optimizer), (second, other)):
        train(model, steps)
    wanted, found = [o.state_dict()["state"] for o in (optimizer, other)]
    kinds = [
        {i: {n: type(v) for n, v in s.items()} for i, s in each.items()} for each in (wanted, found)
    ]
    assert kinds[0] == kinds[1]
    assert_equal(whole(second), whole(first))


def test_what_the_optimizer_had_before_is_gone(tmp_path: Path) -> None:
    """Loaded in a process that continues: with gradients, and state that the checkpoint lacks."""
    make = of_all(torch.optim.Adam, lr=0.01)
    plain = Run(make, 0)
    fresh, trained = Run(make, 0).state, plain.state
    Checkpoints(tmp_path / "fresh").save(0, fresh)
    plain.train(0, 1)
    Checkpoints(tmp_path / "trained").save(2, trained)
    wanted = plain.everything()

    other = Run(make, 0, seed=1)
    loss_of(other.model, tokens_for(0, 0)).backward()
    Checkpoints(tmp_path / "trained").load(other.state)
    assert_equal(other.everything(), wanted)
    Checkpoints(tmp_path / "fresh").load(other.state)
    assert not other.optimizers[0].state


def test_a_frozen_parameter_keeps_its_state(tmp_path: Path) -> None:
    run, other = (Run(of_all(torch.optim.Adam, lr=0.01), 0, seed) for seed in (0, 1))
    run.train(0, 1)
    for each in (run, other):
        each.model.head.weight.requires_grad_(False)
    Checkpoints(tmp_path).save(2, run.state)
    Checkpoints(tmp_path).load(other.state)
    assert_equal(other.everything(), run.everything())


def test_rates_of_numpy_come_back(tmp_path: Path) -> None:
    """A schedule that computes with numpy leaves its scalars in the groups."""
    run, other = (Run(of_all(torch.optim.SGD, lr=0.1), 0, seed) for seed in (0, 1))
    run.optimizers[0].param_groups[0]["lr"] = np.float64(0.25)
    Checkpoints(tmp_path).save(1, run.state)
    Checkpoints(tmp_path).load(other.state)
    assert other.optimizers[0].param_groups[0]["lr"] == 0.25


def test_one_of_several_optimizers(tmp_path: Path) -> None:
    run, other = Run(several, 0), Run(several, 0, seed=1)
    run.optimizers[1].param_groups[0]["lr"] = 0.5
    run.train(0, 1)
    Checkpoints(tmp_path).save(2, run.state)
    Checkpoints(tmp_path).load(TrainingState(other.model, other.optimizers[1:]))
    assert_equal(other.everything()[1][1], run.everything()[1][1])
    assert other.optimizers[1].param_groups[0]["lr"] == 0.5
    assert not other.optimizers[0].state


def test_other_groups_are_refused(tmp_path: Path) -> None:
    run, other = Run(grouped, 0), Run(of_all(torch.optim.AdamW), 0)
    Checkpoints(tmp_path).save(1, run.state)
    with pytest.raises(CheckpointError, match=r"param group 0 .* in several groups"):
        Checkpoints(tmp_path).load(other.state)


def test_parameters_of_another_model_are_refused(tmp_path: Path) -> None:
    alien = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    with pytest.raises(CheckpointError, match=r"SGD .* not one of the model"):
        Checkpoints(tmp_path).save(1, TrainingState(build(), [alien]))


class Noted(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"path": Path("here")}

    def set_extra_state(self, state: Any) -> None: ...


def test_what_a_model_adds_is_plain_data_too(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'model\._extra_state\.path'.*plain data"):
        Checkpoints(tmp_path).save(1, TrainingState(Noted(2, 2)))


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_numbers_keep_their_dtype_beside_bf16(kind: Any, tmp_path: Path) -> None:
    """torch's ``load_state_dict`` would round them to the parameter's, for good."""
    model = nn.Linear(4, 4).bfloat16()
    optimizer = kind(model.parameters())
    model(torch.ones(2, 4).bfloat16()).sum().backward()
    optimizer.step()
    before = {name: v.clone() for name, v in optimizer.state[model.weight].items()}
    state = TrainingState(model, [optimizer])
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    checkpoints.load(state)
    for name, value in before.items():
        found = optimizer.state[model.weight][name]
        assert found.dtype == value.dtype, name
        assert torch.equal(found, value), name


@pytest.mark.parametrize("step", [-1, True, 1.0])
def test_steps_are_numbers(step: Any, tmp_path: Path) -> None:
    checkpoints, state = Checkpoints(tmp_path), TrainingState(nn.Linear(2, 2))
    for save in (checkpoints.save, checkpoints.save_async, checkpoints.save_survivors):
        with pytest.raises(SettingError, match="a whole number"):
            save(step, state)
    assert not list(tmp_path.iterdir())
