"""Modules, values and uses that a plain tensor program knows, and an engine may forget."""

from __future__ import annotations

import copy
import dataclasses
import gc
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.rnn import pack_sequence
from toy_meeting import await_all
from toy_models import full
from toy_tensors import Wrapped
from toy_twins import linear, pair, same_gradients, two_of
from toy_units import states
from typing_extensions import override

from polyshard import fully_shard
from polyshard.engine.collect import move
from polyshard.engine.root import units_below
from polyshard.engine.trees import map_tensors
from polyshard.errors import LifecycleError
from polyshard.group.group import State
from polyshard_testing import ranks


def rows() -> Tensor:
    return torch.linspace(-1, 1, 8).view(2, 4)


def same_training(ours: Any, theirs: Any) -> None:
    for model in (ours, theirs):
        model(rows()).square().sum().backward()
    same_gradients(ours, theirs)


# Values -------------------------------------------------------------------------------------------


class AttributeDict(dict[str, Any]):
    """Items as attributes; ``dict.copy`` makes a plain dict of it."""

    __getattr__ = dict.__getitem__


class Pair(tuple[Any, ...]):
    """A tuple with a constructor of its own."""

    def __new__(cls, first: Any, second: Any) -> Pair:
        return super().__new__(cls, (first, second))

    @property
    def first(self) -> Any:
        return self[0]


@dataclasses.dataclass
class Output(OrderedDict[str, Any]):
    """As of transformers: a dataclass that is a dict, with a field that it needs."""

    hidden: Tensor

    def __post_init__(self) -> None:
        super().__setitem__("hidden", self.hidden)

    @override
    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    @override
    def __reduce__(self) -> Any:
        return Output, (self.hidden,)


@dataclasses.dataclass(frozen=True)
class Computed:
    """A dataclass whose constructor computes, and fills a field that it does not take."""

    half: Tensor
    hidden: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "half", self.half / 2)
        object.__setattr__(self, "hidden", self.half * 2)


class Exchange(nn.Module):
    """Two units that exchange a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = Give(kind), Take(kind)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


class Give(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, linear()

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        made = {"dict": AttributeDict(hidden=y), "pair": Pair(y, 3), "output": Output(hidden=y)}
        return (made | {"computed": Computed(y)})[self.kind]


class Take(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, linear()

    def forward(self, given: Any) -> Tensor:
        hidden = given.first if self.kind == "pair" else given.hidden
        if self.kind == "output":
            assert given["hidden"] is given.hidden
        out: Tensor = self.layer(given.half + hidden if self.kind == "computed" else hidden)
        return out


@pytest.mark.parametrize("kind", ["dict", "pair", "output", "computed"])
@ranks(2)
def test_containers_keep_what_they_can_do(rank: int, size: int, kind: str) -> None:
    ours, theirs = two_of(lambda: Exchange(kind))
    for module in (ours.first, ours.second, ours):
        fully_shard(module)
    same_training(ours, theirs)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda y: y,  # of three dims: a view of a matrix
    "reshaped": lambda y: y.view(-1),
    "transposed": lambda y: y.transpose(0, 1),
    "sliced": lambda y: (2 * y)[:, 1:],
}


class Viewing(nn.Module):
    """Returns a view, and its input as it is."""

    def __init__(self, view: str) -> None:
        super().__init__()
        self.layer, self.view = linear(), VIEWS[view]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.view(self.layer(x)), x


class ChangesInPlace(nn.Module):
    """Changes what its units return."""

    def __init__(self, view: str) -> None:
        super().__init__()
        self.first, self.second, self.last = linear(), Viewing(view), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y, x = self.second(self.first(x))
        y += 1
        out: Tensor = self.last(y.flatten()[:, None]).mean() + x.square().mean()
        return out


@pytest.mark.parametrize("view", VIEWS)
@ranks(2)
def test_outputs_that_are_views_may_be_changed_in_place(rank: int, size: int, view: str) -> None:
    """Autograd forgets hooks of such a view."""
    ours, theirs = two_of(lambda: ChangesInPlace(view))
    for module in (ours.first, ours.second, ours):
        fully_shard(module)
    for step in range(3):
        losses = [model(rows().view(2, 1, 4)) for model in (ours, theirs)]
        await_all(f"forward {step}", size)
        for loss in losses:
            loss.backward()
        same_gradients(ours, theirs)


@pytest.mark.parametrize("view", VIEWS)
@ranks(2)
def test_outputs_of_a_root_that_are_views_may_be_changed_in_place(
    rank: int, size: int, view: str
) -> None:
    ours, theirs = two_of(lambda: Viewing(view))
    fully_shard(ours)
    for _ in range(2):
        for model in (ours, theirs):
            y, _x = model(rows().view(2, 1, 4))
            y += 1
            y.square().sum().backward()
        assert states(ours) == {State.SHARDED}
        same_gradients(ours, theirs)


def test_sizes_of_a_packed_sequence_stay_on_the_host() -> None:
    packed = pack_sequence([torch.ones(3, device="cpu"), torch.ones(2, device="cpu")])
    moved = map_tensors(lambda t: t.to("meta"), (packed,))[0]
    assert type(moved) is type(packed)
    assert moved.data.is_meta
    assert moved.batch_sizes is packed.batch_sizes


def test_dataclasses_are_left_closed_on_demand() -> None:
    held = Output(torch.ones(1, device="cpu"))
    plain = dataclasses.make_dataclass("Held", ["value"])(torch.ones(1, device="cpu"))
    assert map_tensors(lambda t: t.to("meta"), [plain], opens=False)[0] is plain
    assert map_tensors(lambda t: t.to("meta"), [plain])[0].value.is_meta
    assert map_tensors(lambda t: t.to("meta"), held, opens=False).hidden.is_meta


def test_moving_a_subclass_moves_what_is_within() -> None:
    parameter = nn.Parameter(Wrapped(torch.ones(2, 2, device="cpu")))
    parameter.mark = "a user's"  # type: ignore[attr-defined]
    move(parameter, Wrapped(torch.zeros(2, 2, device="cpu")))
    assert isinstance(parameter, nn.Parameter)
    inner: Any = parameter
    assert inner.held.tolist() == [[0, 0], [0, 0]]
    assert inner.mark == "a user's"


# Modules ------------------------------------------------------------------------------------------


class Named(nn.Module):
    """Attributes that an engine could have called its own."""

    def __init__(self) -> None:
        super().__init__()
        self._units = 3
        self._unit = linear()
        self._groups = nn.ModuleList([linear()])
        self._root_unit = "mm"

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._unit(x) * self._units
        for layer in self._groups:
            out = layer(out)
        return out


@ranks(2)
def test_names_of_the_users_class_are_its_own(rank: int, size: int) -> None:
    ours, theirs = two_of(Named)
    fully_shard(ours)
    same_training(ours, theirs)
    with ours.no_sync():
        ours(rows()).square().sum().backward()
    ours.set_requires_gradient_sync(requires_gradient_sync=True)
    theirs(rows()).square().sum().backward()
    same_training(ours, theirs)
    ours.to(torch.float64)
    assert ours._unit.weight.dtype is torch.float64
    assert ours._root_unit == "mm"


class Applies(nn.Linear):
    """Converts a tensor beside its parameters; ``_apply`` as many write it."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.factor = torch.ones(1, device="cpu")

    @override
    def _apply(self, fn: Any) -> Any:  # type: ignore[override]
        super()._apply(fn)  # type: ignore[no-untyped-call]
        self.factor = fn(self.factor)
        return self


@ranks(2)
def test_conversions_of_ones_own(rank: int, size: int) -> None:
    for nested in (True, False):
        layer: Any = Applies()
        fully_shard(layer)
        model = fully_shard(nn.Sequential(layer)) if nested else layer
        model.to(torch.float64)
        assert layer.factor.dtype is layer.weight.dtype is torch.float64


@ranks(2)
def test_a_tuple_of_modules_is_a_unit(rank: int, size: int) -> None:
    ours, theirs = two_of(pair)
    fully_shard((ours[0], ours[1]))  # type: ignore[call-overload]
    fully_shard(ours)
    same_training(ours, theirs)


@ranks(2)
def test_a_plain_module_in_a_unit_can_be_copied(rank: int, size: int) -> None:
    model: Any = fully_shard(pair())
    teacher = copy.deepcopy(model[1])
    model(rows()).sum().backward()
    torch.optim.SGD(model.parameters(), 1.0).step()
    found = teacher.state_dict()["weight"]
    assert not torch.equal(full(found), full(model[1].weight))
    teacher.load_state_dict(model[1].state_dict())
    assert torch.equal(full(teacher.weight), full(model[1].weight))


class Several(torch.optim.Optimizer):
    """Holds optimizers, and has no groups of its own, or shows theirs."""

    def __init__(self, *held: Any) -> None:
        self.optimizers = held


class Shows(Several):
    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]


@pytest.mark.parametrize("kind", [Several, Shows])
@ranks(2)
def test_optimizers_that_only_hold_others(rank: int, size: int, kind: type[Several]) -> None:
    model = pair()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    outer = kind(inner)
    fully_shard(model)
    model(rows()).sum().backward()
    with pytest.raises(LifecycleError, match="built before fully_shard"):
        outer.optimizers[0].step()


@ranks(2)
def test_a_conversion_gives_the_old_shards_back(rank: int, size: int) -> None:
    ours, theirs = two_of(pair)
    for module in (ours[0], ours):
        fully_shard(module)
    ours.set_requires_gradient_sync(requires_gradient_sync=False)
    for model in (ours, theirs):
        model(rows()).square().sum().backward()
    groups = [group for _, _, unit in units_below(ours) for group in unit.groups]
    old = [StorageWeakRef(group.shards.buffer.untyped_storage()) for group in groups]
    for model in (ours, theirs):
        model.double()
    gc.collect()
    deadline = time.monotonic() + 20
    while not all(reference.expired() for reference in old):  # NCCL lets go of it on a thread
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ours.set_requires_gradient_sync(requires_gradient_sync=True)
    for model in (ours, theirs):
        model(rows().double()).square().sum().backward()
    same_gradients(ours, theirs)
