"""What a user changes in an optimizer between steps is what the next step uses, on every tier."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_toys import (
    Recipe,
    assert_same_state,
    assert_same_values,
    sharded_toy,
    tokens_for,
    wrapped,
)
from torch import Tensor, nn
from toy_models import loss_of

from polyshard_offload import DiskSettings, Offload, OffloadError
from polyshard_testing import World

TIERS: dict[str, dict[str, Any]] = {
    "host": {"optimizer": "host"},
    "disk": {"optimizer": "disk"},
    "host in backward": {"optimizer": "host", "step_in_backward": True},
    "disk in backward": {"optimizer": "disk", "step_in_backward": True},
    "half": {"optimizer": "disk", "fraction": 0.5},
}
SHARDED: dict[str, dict[str, Any]] = {
    **TIERS,
    "all on host": {"params": "host", "optimizer": "host"},
    "params on disk": {"params": "disk", "optimizer": "disk"},
    "all on disk in backward": {"params": "disk", "optimizer": "disk", "step_in_backward": True},
}


def make(path: str, tier: str) -> Offload:
    return Offload(chunk_bytes=2000, disk=DiskSettings(path=Path(path)), **SHARDED[tier])


@dataclass
class Run:
    """One training that is edited on the way."""

    optimizer: torch.optim.Optimizer
    params: list[Any]
    spare: list[Any]
    held: dict[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def moment(self) -> str:
        return "exp_avg" if "exp_avg" in self.state[self.params[0]] else "momentum_buffer"

    def each(self, action: Callable[[dict[str, Any]], object]) -> None:
        """``action`` on the state of the first, a middle and the last parameter."""
        for index in (0, len(self.params) // 2, -1):
            action(self.state[self.params[index]])


def filled(value: Tensor, seed: int = 0) -> Tensor:
    """Something else of the same kind, alike in all runs and on all ranks."""
    return torch.full_like(value, 0.25 + seed)


# Each is called after step number ``turn`` (from 0).

Edit = Callable[[Run, int], None]


def new_tensors(run: Run, turn: int) -> None:
    run.each(lambda s: s.__setitem__(run.moment, filled(s[run.moment], turn)))


def in_place(run: Run, turn: int) -> None:
    run.each(lambda s: s[run.moment].mul_(0.5))


def through_data(run: Run, turn: int) -> None:
    run.each(lambda s: s[run.moment].data.mul_(0.5))


def other_data(run: Run, turn: int) -> None:
    def edit(state: dict[str, Any]) -> None:
        state[run.moment].data = filled(state[run.moment], turn)

    run.each(edit)


def foreach(run: Run, turn: int) -> None:
    torch._foreach_mul_([run.state[p][run.moment] for p in run.params], 0.5)


def whole_state(run: Run, turn: int) -> None:
    for p in run.params[::2]:
        run.state[p] = {
            k: v.clone() * 2 if isinstance(v, Tensor) and v.ndim else v
            for k, v in run.state[p].items()
        }


def steps(run: Run, turn: int) -> None:
    run.each(lambda s: s.__setitem__("step", torch.tensor(7.0)) if "step" in s else None)


def steps_in_place(run: Run, turn: int) -> None:
    run.each(lambda s: s["step"].fill_(9.0) if "step" in s else None)


def forget_one(run: Run, turn: int) -> None:
    if turn % 2:
        del run.state[run.params[1]]
        run.state.pop(run.params[-1])


def forget_all(run: Run, turn: int) -> None:
    if turn == 1:
        run.state.clear()
    if turn == 2:
        run.optimizer.state = defaultdict(dict)


def empty_one(run: Run, turn: int) -> None:
    if turn % 2:
        run.state[run.params[1]].clear()
        run.state[run.params[-1]] = {}


def forget_the_moment(run: Run, turn: int) -> None:
    if run.moment == "momentum_buffer":  # Adam takes a state without it for a mistake
        del run.state[run.params[1]]["momentum_buffer"]


def held_dicts(run: Run, turn: int) -> None:
    if turn == 0:
        run.held.update({str(i): run.state[p] for i, p in enumerate(run.params)})
    for state in list(run.held.values())[1::2]:
        state[run.moment] = filled(state[run.moment], turn)
        if "step" in state:
            state["step"] = torch.tensor(3.0)


def held_tensors(run: Run, turn: int) -> None:
    if turn == 0:
        run.held.update({str(i): run.state[p][run.moment] for i, p in enumerate(run.params)})
    for value in run.held.values():
        value.mul_(0.9)


def put_back(run: Run, turn: int) -> None:
    """What was taken out keeps its values, and is the state again once it is put back."""
    state = run.state[run.params[2]]
    if turn == 0:
        run.held["tensor"], state[run.moment] = state[run.moment], filled(state[run.moment])
        run.held["state"] = run.state.pop(run.params[-1])
    if turn == 2:
        state[run.moment] = run.held["tensor"]
        run.state[run.params[-1]] = run.held["state"]


def one_template(run: Run, turn: int) -> None:
    """The same object every time: it is the state once it was put there."""
    state = run.state[run.params[2]]
    run.held.setdefault("template", filled(state[run.moment]))
    state[run.moment] = run.held["template"]


def put_and_write(run: Run, turn: int) -> None:
    """A tensor that was put into the state is what later writes go to."""
    state = run.state[run.params[2]]
    if turn == 0:
        state[run.moment] = run.held["mine"] = filled(state[run.moment])
    run.held["mine"].mul_(0.9)


def more_state(run: Run, turn: int) -> None:
    run.each(lambda s: s.__setitem__("mine", filled(s[run.moment], turn)))


def learning_rate(run: Run, turn: int) -> None:
    run.groups[0]["lr"] *= 0.7
    if "weight_decay" in run.groups[1]:
        run.groups[1]["weight_decay"] = 0.01 * turn


def betas(run: Run, turn: int) -> None:
    if "betas" in run.groups[0]:
        run.groups[0]["betas"] = [0.8, 0.9]
        run.groups[1]["betas"] = (0.5 + 0.1 * turn, 0.9)
    else:
        run.groups[0]["momentum"] = 0.1 * turn


def betas_in_place(run: Run, turn: int) -> None:
    if "betas" in run.groups[0]:
        if turn == 0:
            run.groups[0]["betas"] = [0.8, 0.9]
        run.groups[0]["betas"][0] = 0.1 * turn


def new_group(run: Run, turn: int) -> None:
    if turn == 1:
        run.optimizer.add_param_group({"params": run.spare[:1], "lr": 0.02})
    if turn == 2:
        run.optimizer.add_param_group({"params": run.spare[1:], "lr": 0.03})


def move(run: Run, turn: int) -> None:
    """From one group to another, and an order changed."""
    source, target = run.groups[turn % 2], run.groups[1 - turn % 2]
    target["params"].append(source["params"].pop(0))
    source["params"].reverse()
    run.groups[1]["lr"] = 0.5


def remove(run: Run, turn: int) -> None:
    if turn == 1:
        run.held["removed"] = run.groups[0]["params"].pop()
    if turn == 3:
        run.groups[1]["params"].append(run.held["removed"])


def remove_group(run: Run, turn: int) -> None:
    if turn == 1:
        run.held["group"] = run.groups.pop(0)
    if turn == 3:
        run.groups.append(run.held["group"])


def replace(run: Run, turn: int) -> None:
    if turn == 1:
        for group, spare in zip(run.groups, run.spare, strict=True):
            del run.state[group["params"][0]]  # which torch would not save without its parameter
            group["params"] = [*group["params"][1:], spare]


def load(run: Run, turn: int) -> None:
    if turn == 0:
        run.held["saved"] = copy.deepcopy(run.optimizer.state_dict())
    if turn == 2:
        run.optimizer.load_state_dict(run.held["saved"])


def load_then_edit(run: Run, turn: int) -> None:
    load(run, turn)
    new_tensors(run, turn)


EDITS: list[Edit] = [
    new_tensors,
    in_place,
    through_data,
    other_data,
    foreach,
    whole_state,
    steps,
    steps_in_place,
    forget_one,
    forget_all,
    empty_one,
    forget_the_moment,
    held_dicts,
    held_tensors,
    put_back,
    one_template,
    put_and_write,
    more_state,
    learning_rate,
    betas,
    betas_in_place,
    new_group,
    move,
    remove,
    remove_group,
    replace,
    load,
    load_then_edit,
]
NAMES = {edit.__name__: edit for edit in EDITS}
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda g: torch.optim.Adam(g, lr=0.1),
    "SGD": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9),
}


# Plain parameters, without any process group ----------------------------------------------------


def trained(offload: Offload | None, kind: str, edit: Edit) -> Run:
    generator = torch.Generator().manual_seed(0)
    every = [nn.Parameter(torch.randn(40, 5, generator=generator)) for _ in range(10)]
    params, spare = every[:8], every[8:]
    groups = [{"params": params[:5]}, {"params": params[5:], "lr": 0.05}]
    run = Run(wrapped(KINDS[kind](groups), offload), params, spare)
    for turn in range(6):
        sum((p * (i + turn)).square().sum() for i, p in enumerate(every)).backward()  # type: ignore[union-attr]
        run.optimizer.step()
        for p in every:
            p.grad = None
        with torch.no_grad():
            edit(run, turn)
    run.params = every
    return run


def assert_same_runs(run: Run, other: Run) -> None:
    for index, (a, b) in enumerate(zip(run.params, other.params, strict=True)):
        assert torch.equal(a, b), index
    assert_same_state(run.optimizer, other.optimizer)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("edit", NAMES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tier", TIERS)
def test_edits_are_honoured(tmp_path: Path, tier: str, kind: str, edit: str) -> None:
    plain = trained(None, kind, NAMES[edit])
    assert_same_runs(trained(make(str(tmp_path), tier), kind, NAMES[edit]), plain)


LATE = [
    new_tensors,
    in_place,
    whole_state,
    steps,
    steps_in_place,
    forget_one,
    empty_one,
    more_state,
    learning_rate,
    betas,
    betas_in_place,
    move,
    remove,
    remove_group,
]


@pytest.mark.parametrize("edit", [edit.__name__ for edit in LATE])
def test_edits_that_come_too_late_are_refused(tmp_path: Path, edit: str) -> None:
    """Between a backward that has stepped and ``step()``."""
    params = [nn.Parameter(torch.ones(40, 5)) for _ in range(4)]
    groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": params[2:]}]
    groups[0]["betas"] = [0.9, 0.99]
    made = torch.optim.Adam(groups, lr=0.1)
    optimizer = make(str(tmp_path), "disk in backward").wrap(made)
    run = Run(optimizer, params, [])
    for turn in range(2):
        sum(p.square().sum() for p in params).backward()  # type: ignore[union-attr]
        if turn:
            with torch.no_grad():
                NAMES[edit](run, 1)
            with pytest.raises(OffloadError, match=r"between backward and step.*after step\(\)"):
                optimizer.step()
            with pytest.raises(OffloadError, match="an earlier step failed half way"):
                optimizer.step()
        else:
            optimizer.step()
            optimizer.zero_grad()


def test_what_is_edited_again_and_again_takes_no_more_room(tmp_path: Path) -> None:
    offload = make(str(tmp_path), "disk")
    params = [nn.Parameter(torch.ones(400, 5)) for _ in range(4)]
    run = Run(offload.wrap(torch.optim.Adam(params)), params, [])
    taken = []
    for turn in range(12):
        for p in params:
            p.grad = torch.ones_like(p)
        run.optimizer.step()
        new_tensors(run, turn)
        forget_one(run, turn)
        taken.append(offload.tiers.files["optimizer state"].reserved_bytes)
    assert taken[-1] == taken[4] < 2 * taken[0]


# Sharded ones ------------------------------------------------------------------------------------


def trained_sharded(offload: Offload | None, rank: int, name: str) -> tuple[Any, Run]:
    kind = "SGD" if name == "forget_the_moment" else "Adam"
    model = sharded_toy(offload, Recipe())
    every = [p for p in model.parameters() if p.requires_grad]
    used = [p for n, p in model.named_parameters() if "unused" not in n and p.requires_grad]
    params, spare = [p for p in used if p.numel()][:-2], used[-2:]
    groups = [{"params": params[:7]}, {"params": params[7:], "lr": 0.05}]
    run = Run(wrapped(KINDS[kind](groups), offload), params, spare)
    for turn in range(5):
        loss_of(model, tokens_for(turn, rank)).backward()
        run.optimizer.step()
        for p in every:
            p.grad = None
        with torch.no_grad():
            NAMES[name](run, turn)
    return model, run


@functools.cache
def without_offload(rank: int, name: str) -> tuple[Any, Run]:
    """Once a rank and edit; only to be looked at."""
    return trained_sharded(None, rank, name)


def sharded(rank: int, size: int, path: str, tier: str, name: str) -> None:
    """The same training as without offload."""
    model, run = without_offload(rank, name)
    other, mine = trained_sharded(make(path, tier), rank, name)
    assert_same_values(model, other)
    assert_same_state(run.optimizer, mine.optimizer)


@pytest.mark.sampled(64)
@pytest.mark.parametrize("tier", SHARDED)
@pytest.mark.parametrize("name", NAMES)
def test_edits_of_sharded_state_are_honoured(
    world2: World, tier: str, name: str, tmp_path: Path
) -> None:
    world2.run(sharded, str(tmp_path), tier, name)
