"""Ranks: whatever is edited between a backward and a step is stepped as torch would have it.

Each edit is made to two models of one engine, one of which steps flat. Edits are of one parameter,
so that the others of its run continue; and they follow each other in any order.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW
from toy_flat import Trained, assert_same, local_part
from toy_models import loss_of, reset_together, tokens_for
from toy_optimizers import EVERY, runs_of

import polyshard
from polyshard_testing import ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

Edit = Callable[[Trained, Any], None]


def replace_gradient(trained: Trained, parameter: Any) -> None:
    if parameter.grad is not None:
        parameter.grad = parameter.grad * 2


def set_data_of_gradient(trained: Trained, parameter: Any) -> None:
    """Of a ``DTensor`` this is without effect, in torch too."""
    if parameter.grad is not None:
        parameter.grad.data = torch.zeros_like(parameter.grad)


def move_gradient(trained: Trained, parameter: Any) -> None:
    """Its memory, beneath the same objects."""
    if parameter.grad is not None:
        local = parameter.grad.to_local()
        local.data = local * 3


def edit_gradient(trained: Trained, parameter: Any) -> None:
    if parameter.grad is not None:
        parameter.grad.to_local().mul_(0.5)


def drop_gradient(trained: Trained, parameter: Any) -> None:
    parameter.grad = None


def set_data(trained: Trained, parameter: Any) -> None:
    """Of a ``DTensor`` this is without effect, in torch too."""
    parameter.data = parameter.detach() * 2


def move_parameter(trained: Trained, parameter: Any) -> None:
    """What is frozen shows its local tensor itself."""
    parameter.requires_grad_(False)
    local = parameter.to_local()
    local.data = local * 0.5
    parameter.requires_grad_(True)


def edit_parameter(trained: Trained, parameter: Any) -> None:
    with torch.no_grad():
        parameter.add_(0.25)


def replace_state(trained: Trained, parameter: Any) -> None:
    state = trained.optimizer.state.get(parameter)
    if state:
        state["exp_avg"] = state["exp_avg"] * 2
        state["step"] = state["step"] + 3


def edit_state(trained: Trained, parameter: Any) -> None:
    state = trained.optimizer.state.get(parameter)
    if state:
        state["exp_avg_sq"].mul_(2.0)
        state["step"].add_(1.0)


def move_state(trained: Trained, parameter: Any) -> None:
    """Its memory, beneath the same objects; other code holds what was there."""
    state = trained.optimizer.state.get(parameter)
    if state:
        for name, factor in (("exp_avg", 2.0), ("exp_avg_sq", 3.0), ("step", 2.0)):
            local = local_part(state[name])
            trained.kept.append(local.detach())
            local.data = local * factor


def share_state(trained: Trained, parameter: Any) -> None:
    """With other processes: the storages stay, and get other memory."""
    state = trained.optimizer.state.get(parameter)
    if state:
        for value in state.values():
            local_part(value).share_memory_()
        state["exp_avg"].mul_(2.0)


def replace_dict(trained: Trained, parameter: Any) -> None:
    state = trained.optimizer.state.get(parameter)
    if state:
        trained.optimizer.state[parameter] = {name: v * 2 for name, v in state.items()}


def forget(trained: Trained, parameter: Any) -> None:
    trained.optimizer.state.pop(parameter, None)


def use_tensor_lr(trained: Trained, parameter: Any) -> None:
    for group in trained.optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]) * 0.9)


def edit_lr(trained: Trained, parameter: Any) -> None:
    for group in trained.optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].mul_(0.5)
        else:
            group["lr"] *= 0.5


def remove(trained: Trained, parameter: Any) -> None:
    for group in trained.optimizer.param_groups:
        kept = [p for p in group["params"] if p is not parameter]
        if kept and len(kept) < len(group["params"]):
            group["params"] = kept
            trained.optimizer.state.pop(parameter, None)


def add(trained: Trained, parameter: Any) -> None:
    """In a group of its own."""
    remove(trained, parameter)
    groups = trained.optimizer.param_groups
    if not any(p is parameter for group in groups for p in group["params"]):
        trained.optimizer.add_param_group({"params": [parameter], "lr": 0.1})


def freeze(trained: Trained, parameter: Any) -> None:
    parameter.requires_grad_(not parameter.requires_grad)


def zero(trained: Trained, parameter: Any) -> None:
    trained.optimizer.zero_grad(set_to_none=False)


def zero_to_none(trained: Trained, parameter: Any) -> None:
    trained.optimizer.zero_grad()


def load(trained: Trained, parameter: Any) -> None:
    """What was saved a while ago, or now."""
    fits = trained.saved and [len(g["params"]) for g in trained.saved["param_groups"]] == [
        len(g["params"]) for g in trained.optimizer.param_groups
    ]
    if fits:
        trained.optimizer.load_state_dict(trained.saved)
    trained.saved = copy.deepcopy(trained.optimizer.state_dict())


def convert(trained: Trained, parameter: Any) -> None:
    """Model and gradients, then state."""
    dtype = torch.float64 if parameter.dtype == torch.float32 else torch.float32
    trained.model.to(dtype)
    for state in trained.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].to(dtype)


def start_over(trained: Trained, parameter: Any) -> None:
    """In the middle of a forward, as after an exception; then a whole one."""
    loss_of(trained.model, tokens_for(50, trained.rank))
    reset_together(trained.model)
    loss_of(trained.model, tokens_for(51, trained.rank)).backward()


EDITS: tuple[Edit, ...] = (
    replace_gradient,
    set_data_of_gradient,
    move_gradient,
    edit_gradient,
    drop_gradient,
    set_data,
    move_parameter,
    edit_parameter,
    replace_state,
    edit_state,
    move_state,
    share_state,
    replace_dict,
    forget,
    use_tensor_lr,
    edit_lr,
    remove,
    add,
    freeze,
    zero,
    zero_to_none,
    load,
    convert,
    start_over,
)


def compare_edits(name: str, rank: int, edits: list[list[tuple[Edit, int]]]) -> Trained:
    """A step for each list of edits, each of the parameter at a place."""
    pair = [Trained(EVERY[name], rank, is_flat=is_flat) for is_flat in (False, True)]
    for index, chosen in enumerate(edits):

        def event(_: int, trained: Trained, chosen: list[tuple[Edit, int]] = chosen) -> None:
            parameters = list(trained.model.parameters())
            for edit, place in chosen:
                edit(trained, parameters[place])

        losses = [trained.step(index, event) for trained in pair]
        assert losses[0] == losses[1]
        assert_same(*pair)
    return pair[1]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@ranks(2)
def test_one_edit_after_steps_that_hold(rank: int, size: int, edit: Edit) -> None:
    """In the midst of a run, once and again, with steps before, in between and after."""
    once = [(edit, 3)]
    compare_edits("AdamW fused", rank, [[], [], once, [], once, []])


@pytest.mark.parametrize("seed", range(3))
@ranks(2)
def test_edits_in_any_order(rank: int, size: int, seed: int) -> None:
    choose = random.Random(seed)
    edits = [
        [(choose.choice(EDITS), choose.randrange(14)) for _ in range(choose.choice((0, 1, 1, 3)))]
        for _ in range(12)
    ]
    compare_edits(choose.choice(("AdamW", "AdamW fused", "AdamW foreach")), rank, edits)


@ranks(2)
def test_a_closed_model_has_its_parameters_stepped(rank: int, size: int) -> None:
    """Parameters and gradients stay when plugins have let go."""
    pair = [Trained(lambda p: AdamW(p, fused=True), rank, is_flat=f) for f in (False, True)]
    for trained in pair:
        for index in range(3):
            trained.step(index)
        loss_of(trained.model, tokens_for(3, rank)).backward()
        polyshard.close(trained.model)
        for _ in range(2):
            trained.optimizer.step()
    assert_same(*pair)
    assert runs_of(pair[1].optimizer)[0] > 1
