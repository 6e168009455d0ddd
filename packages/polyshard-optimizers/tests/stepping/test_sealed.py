"""State that was never shown is not looked at, and whatever was shown is."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from toy_flat import Trained, assert_same, local_part
from toy_optimizers import EVERY, Shelf

from polyshard_optimizers import flat
from polyshard_testing import ranks

Hold = Callable[[Any, Any], Any]
Change = Callable[[Any], None]


def is_sealed(trained: Trained) -> bool:
    plan: Any = trained.optimizer._polyshard_flat.plan  # type: ignore[attr-defined]
    return bool(plan.seal.is_closed)


def set_data(local: Any) -> None:
    local.data = local * 3


def of_dict(state: Any) -> None:
    state["exp_avg"] = state["exp_avg"] * 3


def of_storage(storage: Any) -> None:
    """The memory beneath stays the storage's, elsewhere, and holds something else."""
    storage.share_memory_()
    torch.empty(0).set_(storage).mul_(3)


# What other code may keep of optimizer.state[parameter], and how it is changed by that alone.
KEPT: dict[str, tuple[Hold, Change]] = {
    "entry": (lambda states, p: states[p]["exp_avg"], lambda e: set_data(local_part(e))),
    "local tensor": (lambda states, p: local_part(states[p]["exp_avg"]), set_data),
    "counter": (lambda states, p: states[p]["step"], lambda step: step.add_(3)),
    "counter's memory": (lambda states, p: states[p]["step"], set_data),
    "alias": (
        lambda states, p: local_part(states[p]["exp_avg"]).detach(),
        lambda alias: of_storage(alias.untyped_storage()),
    ),
    "storage": (lambda states, p: local_part(states[p]["exp_avg"]).untyped_storage(), of_storage),
    "weak reference": (
        lambda states, p: weakref.ref(states[p]["exp_avg"]),
        lambda found: set_data(local_part(found())),
    ),
    "dict": (lambda states, p: states[p], of_dict),
    "dict's values": (
        lambda states, p: states[p].values(),
        lambda values: set_data(local_part(next(v for v in values if v.ndim))),
    ),
    "mapping": (
        lambda states, p: (states, p),
        lambda kept: of_dict(kept[0][kept[1]]),
    ),
}


def check_kept(rank: int, size: int, kind: str) -> None:
    hold, change = KEPT[kind]
    pair = [Trained(EVERY["AdamW foreach"], rank, is_flat=is_flat) for is_flat in (False, True)]
    ours = pair[1]
    kept: list[Any] = []

    def steps(*indices: int) -> None:
        for index in indices:
            assert pair[0].step(index) == pair[1].step(index)

    steps(0, 1, 2)
    assert is_sealed(ours)
    for trained in pair:
        parameters = [p for p in trained.model.parameters() if local_part(p).numel()]
        kept.append(hold(trained.optimizer.state, parameters[1]))
    steps(3, 4, 5, 6, 7)
    assert not is_sealed(ours), "somebody keeps a part"
    for one in kept:
        change(one)
    steps(8)
    assert_same(*pair)
    del one
    kept.clear()
    gc.collect()
    steps(*range(9, 30))
    assert is_sealed(ours), "nobody keeps it any more"
    assert_same(*pair)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KEPT)
@ranks(2)
def test_what_somebody_keeps(rank: int, size: int, kind: str) -> None:
    check_kept(rank, size, kind)


@ranks(2)
def test_state_that_is_replaced(rank: int, size: int) -> None:
    """By loading, and by hand, while it is sealed."""
    pair = [Trained(EVERY["AdamW"], rank, is_flat=is_flat) for is_flat in (False, True)]
    saved = []
    for trained in pair:
        trained.step(0)
        saved.append(copy.deepcopy(trained.optimizer.state_dict()))
        for index in range(1, 5):
            trained.step(index)
    assert is_sealed(pair[1])
    for trained, state in zip(pair, saved, strict=True):
        trained.optimizer.load_state_dict(state)
        for index in range(5, 9):
            trained.step(index)
    assert_same(*pair)
    for trained in pair:
        changed = copy.copy(trained.optimizer.state)
        for state in changed.values():
            state["step"] = state["step"] + 5
        trained.optimizer.state = changed
        for index in range(9, 13):
            trained.step(index)
    assert_same(*pair)


@ranks(2)
def test_a_checkpoint_opens_it_for_a_step(rank: int, size: int) -> None:
    trained = Trained(EVERY["AdamW fused"], rank, is_flat=True)
    for index in range(4):
        trained.step(index)
    assert is_sealed(trained)
    state = trained.optimizer.state_dict()
    assert not is_sealed(trained)
    trained.step(4)
    assert not is_sealed(trained)
    del state
    for index in range(5, 8):
        trained.step(index)
    assert is_sealed(trained)


def test_state_that_other_processes_share_is_looked_at() -> None:
    """The test does not hold it, and it changes."""
    shelf = Shelf((8,))
    optimizer = flat(torch.optim.AdamW(shelf.params))
    shelf.give_gradients()
    optimizer.step()
    for value in optimizer.state[shelf.params[0]].values():
        value.share_memory_()
    del value
    for _ in range(6):
        shelf.give_gradients()
        optimizer.step()
    assert not optimizer._polyshard_flat.plan.seal.is_closed  # type: ignore[attr-defined]


def test_a_thread_that_reads_state_while_the_seal_closes_keeps_it_open() -> None:
    """It has noted that it reads, and has the mapping not yet in hand."""
    shelf = Shelf((8, 4))
    optimizer: Any = flat(torch.optim.AdamW(shelf.params))
    stepper = optimizer._polyshard_flat
    was_shown = stepper.state_was_shown

    def step_meanwhile() -> None:
        del stepper.state_was_shown
        was_shown()
        for _ in range(6):
            shelf.give_gradients()
            optimizer.step()

    shelf.give_gradients()
    optimizer.step()
    stepper.state_was_shown = step_meanwhile
    states = optimizer.state
    assert not stepper.plan.seal.is_closed
    assert states
