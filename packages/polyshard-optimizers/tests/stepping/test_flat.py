"""One process: whatever users do between steps, flat steps make torch's bits."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from toy_optimizers import EVERY, Make, Shelf, runs_of, same_bits, torch_steps

from polyshard_optimizers import flat

Event = Callable[[int, Shelf, Optimizer], None]
SIZES = (64, 32, 7, 128, 1, 0, 33, 96, 64)


class Pair:
    """The same parameters stepped by torch and by flat, compared after every step."""

    def __init__(self, make: Make, *shelf: Any, count: int = len(SIZES)) -> None:
        given = shelf or (SIZES,)
        self.shelves = [Shelf(*given), Shelf(*given)]
        self.optimizers = [make(each.params[:count]) for each in self.shelves]
        flat(self.optimizers[1])

    def step(self, index: int, event: Event | None = None) -> None:
        for shelf, optimizer in zip(self.shelves, self.optimizers, strict=True):
            shelf.give_gradients()
            if event is not None:
                event(index, shelf, optimizer)
            optimizer.step()
        self.check()

    def check(self) -> None:
        theirs, ours = self.shelves
        for one, other in zip(theirs.params, ours.params, strict=True):
            assert same_bits(one, other)
        assert same_bits(theirs.padding, ours.padding), "padding is nobody's"
        first, second = (optimizer.state_dict() for optimizer in self.optimizers)
        assert first["state"].keys() == second["state"].keys()
        assert first["param_groups"] == second["param_groups"]
        for key, state in first["state"].items():
            assert list(state) == list(second["state"][key])
            for name, value in state.items():
                found = second["state"][key][name]
                same = same_bits(value, found) if isinstance(value, Tensor) else value == found
                assert same, (key, name, value, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", EVERY)
def test_weights_and_state_are_torchs_bits(name: str, dtype: torch.dtype) -> None:
    if name == "SGD fused" and dtype is torch.bfloat16:
        pytest.skip("torch mixes up elements there: it does not agree with itself")
    pair = Pair(EVERY[name], SIZES, dtype)
    for index in range(5):
        pair.step(index)


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "AdamW without eps", "Adadelta"])
def test_padding_is_left_alone(name: str) -> None:
    pair = Pair(EVERY[name], SIZES, torch.float32, 3)
    for index in range(3):
        pair.step(index)


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 7, 32, 33, 64, 100]), min_size=1, max_size=7),
    gap=st.sampled_from([0, 0, 5]),
    name=st.sampled_from(sorted(EVERY)),
    missing=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=6),
)
def test_any_layout_with_any_gradients(
    sizes: list[int], gap: int, name: str, missing: set[tuple[int, int]]
) -> None:
    def drop(index: int, shelf: Shelf, optimizer: Optimizer) -> None:
        del optimizer
        for place, parameter in enumerate(shelf.params):
            if (index, place) in missing:
                parameter.grad = None

    assume(torch_steps(name, len(sizes), missing))
    pair = Pair(EVERY[name], sizes, torch.float32, gap, count=len(sizes))
    for index in range(4):
        pair.step(index, drop)


def test_large_runs_are_stepped_in_chunks() -> None:
    """One parameter larger than a chunk, between small ones; in every mode."""
    for name in ("AdamW", "AdamW foreach", "AdamW fused", "SGD momentum"):
        pair = Pair(EVERY[name], (64, 3_000_000, 640), torch.float32, count=3)
        for index in range(3):
            pair.step(index)
        assert runs_of(pair.optimizers[1]) == [3]


class Peak(TorchDispatchMode):
    """The most bytes that operations have allocated and that were alive at once."""

    now = most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs or {}))}
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
                self.most = max(self.most, self.now)
        return out

    def _free(self, nbytes: int) -> None:
        self.now -= nbytes


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, Tensor)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["AdamW", "AdamW foreach", "AdamW fused", "NAdam foreach"])
def test_temporaries_are_small(name: str) -> None:
    shelf = Shelf((8_000_000, 64, 16_000_000))  # 96 MB
    optimizer = flat(EVERY[name](shelf.params))
    for _ in range(3):
        shelf.give_gradients()
        with Peak() as peak:  # type: ignore[no-untyped-call]
            optimizer.step()
    assert peak.most < 64 << 20


def scale_lr(index: int, shelf: Shelf, optimizer: Optimizer) -> None:
    del shelf
    optimizer.param_groups[0]["lr"] *= 1.0 + index


def use_tensor_lr(index: int, shelf: Shelf, optimizer: Optimizer) -> None:
    del shelf
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-3 * (1 + index))


def own_gradients(index: int, shelf: Shelf, optimizer: Optimizer) -> None:
    """New tensors, one of which is not contiguous; the third step has the buffer's again."""
    del optimizer
    if index != 2:
        for parameter in shelf.params:
            assert parameter.grad is not None
            parameter.grad = torch.stack([parameter.grad * 2] * 2, -1)[..., 0]


def edit_in_place(index: int, shelf: Shelf, optimizer: Optimizer) -> None:
    if index == 2:
        optimizer.state[shelf.params[1]]["exp_avg"].mul_(2.0)
        optimizer.state[shelf.params[3]]["step"].add_(3.0)


def assign(index: int, shelf: Shelf, optimizer: Optimizer) -> None:
    if index == 2:
        state = optimizer.state[shelf.params[1]]
        state["exp_avg"] = torch.full_like(shelf.params[1], 0.5)
        state["exp_avg_sq"].data = torch.full_like(shelf.params[1], 0.25)
        optimizer.state[shelf.params[3]]["step"] = torch.tensor(7.0)


def share_state(index: int, shelf: Shelf, optimizer: Optimizer) -> None:
    """One tensor for two parameters, then one each again."""
    if index == 1:
        for place in (0, 8):
            optimizer.state[shelf.params[place]]["step"] = torch.tensor(5.0)


def forget(index: int, shelf: Shelf, optimizer: Optimizer) -> None:
    if index == 2:
        del optimizer.state[shelf.params[3]]
    if index == 4:
        optimizer.state.clear()


def load(index: int, shelf: Shelf, optimizer: Optimizer) -> None:
    del shelf
    if index == 1:
        optimizer.saved = copy.deepcopy(optimizer.state_dict())  # type: ignore[attr-defined]
    if index == 3:
        optimizer.load_state_dict(optimizer.saved)  # type: ignore[attr-defined]


def load_live(index: int, shelf: Shelf, optimizer: Optimizer) -> None:
    """Its own state dict, whose tensors are the ones it works with."""
    del shelf
    if index == 3:
        optimizer.load_state_dict(optimizer.state_dict())


def add_group(index: int, shelf: Shelf, optimizer: Optimizer) -> None:
    if index == 2:
        optimizer.add_param_group({"params": shelf.params[5:], "lr": 0.5})


def take_away(index: int, shelf: Shelf, optimizer: Optimizer) -> None:
    if index == 2:
        del optimizer.param_groups[0]["params"][1:3]
        for parameter in shelf.params[1:3]:
            optimizer.state.pop(parameter)


def move_weights(index: int, shelf: Shelf, optimizer: Optimizer) -> None:
    del optimizer
    if index == 2:
        shelf.params[3].data = shelf.params[3].data.clone()


def choose_foreach(index: int, shelf: Shelf, optimizer: Optimizer) -> None:
    del shelf
    optimizer.param_groups[0]["foreach"] = index % 2 == 1


EVENTS = (
    scale_lr,
    use_tensor_lr,
    own_gradients,
    edit_in_place,
    assign,
    share_state,
    forget,
    load,
    load_live,
    take_away,
    move_weights,
    choose_foreach,
)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_whatever_users_do_between_steps(event: Event) -> None:
    pair = Pair(lambda params: AdamW(params, lr=1e-2))
    for index in range(6):
        pair.step(index, event)


@pytest.mark.parametrize("name", ["AdamW fused", "SGD momentum"])
def test_groups_may_come_later(name: str) -> None:
    pair = Pair(EVERY[name], count=4)
    for index in range(5):
        pair.step(index, add_group)
    assert len(pair.optimizers[1].param_groups) == 2


def test_what_people_hold_stays_the_state() -> None:
    shelf = Shelf(SIZES)
    optimizer = flat(AdamW(shelf.params))
    shelf.give_gradients()
    optimizer.step()
    held = optimizer.state_dict()["state"][0]["exp_avg"]
    steps = optimizer.state[shelf.params[0]]["step"]
    for _ in range(2):
        shelf.give_gradients()
        optimizer.step()
    assert held is optimizer.state[shelf.params[0]]["exp_avg"]
    assert steps.item() == 3.0
    loaded = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(loaded)
    own = optimizer.state[shelf.params[0]]["exp_avg"]
    shelf.give_gradients()
    optimizer.step()
    assert own is optimizer.state[shelf.params[0]]["exp_avg"]


def test_state_is_saved_alone() -> None:
    """Each tensor begins a storage of its own size, so that one parameter's state is small."""
    shelf = Shelf((64, 1_000_000))
    optimizer = flat(AdamW(shelf.params))
    for _ in range(2):
        shelf.give_gradients()
        optimizer.step()
    for value in optimizer.state[shelf.params[0]].values():
        assert value.storage_offset() == 0
        assert value.untyped_storage().nbytes() == value.nbytes
    assert len(pickle.dumps(optimizer.state[shelf.params[0]])) < 10_000


def test_memory_of_gradients_is_free_after_zero_grad() -> None:
    from polyshard._torch.private import storage_holders

    shelf = Shelf(SIZES)
    optimizer = flat(AdamW(shelf.params))
    gradients = torch.ones(1000)
    for parameter in shelf.params:
        parameter.grad = gradients[: parameter.numel()]
    optimizer.step()
    optimizer.zero_grad()
    assert storage_holders(gradients) == 1


def test_closures_hooks_and_profiler() -> None:
    shelf = Shelf(SIZES)
    optimizer = flat(AdamW(shelf.params))
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *a: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *a: seen.append("post"))
    shelf.give_gradients()

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        return torch.tensor(3.0)

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert optimizer.step(closure) == 3.0
    assert seen == ["pre", "post"]
    names = [event.name for event in profiler.events() or ()]
    assert names.count("Optimizer.step#AdamW.step") == 1


def test_state_comes_in_the_order_of_parameters() -> None:
    """As torch has it, wherever they rest: state dicts that are gone through on all ranks agree."""
    shelf = Shelf(SIZES)
    params = [shelf.params[i] for i in range(len(SIZES) - 1, -1, -1)]
    groups: list[dict[str, Any]] = [{"params": params[:1], "lr": 0.1}, {"params": params[1:]}]
    optimizer = flat(AdamW(groups))
    shelf.give_gradients()
    late = params[1]
    late.grad = None
    optimizer.step()
    assert list(map(id, optimizer.state)) == [id(p) for p in params if p is not late]
    shelf.give_gradients()
    optimizer.step()
    assert list(map(id, optimizer.state))[-1] == id(late)


def test_schedulers_and_plans() -> None:
    """The same object for schedulers; nothing is planned twice while nothing changes."""
    shelf = Shelf(SIZES)
    optimizer = flat(AdamW(shelf.params, lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    plans = []
    for _ in range(5):
        shelf.give_gradients()
        optimizer.step()
        scheduler.step()
        plans.append(optimizer._polyshard_flat.plan)  # type: ignore[attr-defined]
    assert optimizer.param_groups[0]["lr"] == 0.5**5
    assert plans[1] is not plans[0], "there is state now"
    assert plans[1] is plans[2] is plans[3] is plans[4]


def test_copies_are_of_the_users_class() -> None:
    shelf = Shelf(SIZES)
    optimizer = flat(AdamW(shelf.params))
    shelf.give_gradients()
    optimizer.step()
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(copied) is AdamW
        copied.param_groups[0]["params"][0].grad = torch.ones(64)
        copied.step()
