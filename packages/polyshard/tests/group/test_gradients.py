"""Gradients from autograd to ``.grad``: shared memory, waiting, absence. Oracles are plain sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from toy_codecs import Codecs
from toy_models import full, reset_together
from typing_extensions import override

from polyshard import MixedPrecisionPolicy, Plugin, fully_shard, hookimpl
from polyshard.plugins.builtin import DeviceStorage
from polyshard.plugins.seams import GroupInfo, StorageFactory
from polyshard.program.accumulation import blanks
from polyshard.sharding.layout import GroupLayout
from polyshard_testing import ranks

SHAPES = {"fsdp": (4,), "hsdp": (2, 2), "replicas": (4, 1)}


def mesh_of(kind: str) -> Any:
    shape = SHAPES[kind]
    return init_device_mesh(
        torch.get_default_device().type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
    )


# Shared memory --------------------------------------------------------------------------------


class Shared(nn.Module):
    """Both parameters get one gradient, seen through two views."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(4, 6))
        self.second = nn.Parameter(torch.ones(6, 4))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        both = self.first.view(-1) + self.second.view(-1)
        both.register_hook(self.seen.append)
        return (both * x).sum()


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@ranks(2)
def test_gradients_may_share_memory(
    rank: int, size: int, dtype: torch.dtype, micro_batches: int
) -> None:
    """Torch itself counts such gradients twice when it adds up micro-batches."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    model: Any = fully_shard(Shared(), mp_policy=policy)
    x = torch.arange(24.0) * 8
    for micro in range(micro_batches):
        model.set_requires_gradient_sync(micro == micro_batches - 1)
        model(x * (1 + rank)).backward()
    mean = x * micro_batches * sum(1 + r for r in range(size)) / size
    torch.testing.assert_close(full(model.first.grad), mean.view(4, 6))
    torch.testing.assert_close(full(model.second.grad), mean.view(6, 4))
    for seen in model.seen:  # what a hook has kept is not written to
        torch.testing.assert_close(seen.float(), x * (1 + rank))


# Waiting --------------------------------------------------------------------------------------


class Pair(nn.Module):
    """Two matrices and a vector, of which each forward uses some; the rest has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.ones(5))
        self.large = nn.Parameter(torch.ones(528, 130))
        self.small = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: Tensor, large: bool, small: bool) -> Tensor:
        out = (self.always * x).sum()
        if large:
            out = out + (self.large * x * 2).sum()
        if small:
            out = out + (self.small * x * 3).sum()
        return out


def waiting(way: str, model: Any) -> Any:
    """The setting of a micro-batch that another follows."""

    @contextmanager
    def block() -> Iterator[None]:
        if way == "no sync":
            model.set_requires_gradient_sync(False)
        elif way == "no all-reduce":
            model.set_requires_all_reduce(False)
        else:
            model.set_is_last_backward(False)
        try:
            yield
        finally:  # as torch's, this sets both
            model.set_requires_gradient_sync(True)
            model.set_is_last_backward(True)

    return block()


HUGE = 1e20


class Checked(DeviceStorage):
    """Takes each iteration's gradients once, and looks at all of what it is given."""

    holds_gradients = True

    @override
    def place_gradient(self, gradient: Tensor) -> Tensor:
        placed = gradient.clone()
        self.largest = float(placed.abs().max())
        return placed


class Checking(Plugin, StorageFactory):
    name, settings = "checking", ""

    def __init__(self) -> None:
        self.storages: list[Checked] = []

    def bind(self, group: GroupInfo, layout: GroupLayout) -> Checked:
        self.storages.append(Checked())
        return self.storages[-1]

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> Checking:
        return self


def spoil(model: Any) -> None:
    """Leave a step behind whose memory is used again, with values that show."""
    model(torch.tensor(HUGE), True, True).backward()
    model.zero_grad()


def waits(way: str, kind: str, plugins: str) -> bool:
    """Whether nothing is in ``.grad`` after a micro-batch that another follows."""
    replicated = kind != "fsdp"
    in_parts = way == "no all-reduce" and replicated
    return way == "no sync" or in_parts or (way == "in flight" and plugins == "storage")


@pytest.mark.sampled(9)
@pytest.mark.parametrize("plugins", ["native", "codec", "storage"])
@pytest.mark.parametrize("way", ["no sync", "no all-reduce", "in flight"])
@pytest.mark.parametrize("kind", SHAPES)
@ranks(4)
def test_parameters_may_be_absent_from_some_micro_batches(
    rank: int, size: int, kind: str, way: str, plugins: str
) -> None:
    checking = Checking()
    given: dict[str, list[object]] = {"native": [], "codec": [Codecs()], "storage": [checking]}
    model: Any = fully_shard(Pair(), mesh=mesh_of(kind), plugins=given[plugins])
    model.set_gradient_divide_factor(2.0)
    for uses in product([False, True], repeat=4):
        spoil(model)
        twin = Pair()
        for micro, used in enumerate((uses[:2], uses[2:])):
            for r in range(size):
                (twin(torch.tensor(1.0 + micro + r), *used) / 2).backward()
            model_x = torch.tensor(1.0 + micro + rank)
            if micro == 1:
                model(model_x, *used).backward()
                continue
            with waiting(way, model):
                model(model_x, *used).backward()
            if way != "in flight":
                assert (model.always.grad is None) is waits(way, kind, plugins)
        for name, parameter in model.named_parameters():
            expected = twin.get_parameter(name).grad
            assert (parameter.grad is None) == (expected is None), (name, uses)
            if expected is not None:
                torch.testing.assert_close(full(parameter.grad), expected)
        assert all(s.largest < HUGE for s in checking.storages)
        model.zero_grad()


class Choice(nn.Module):
    """Two units, of which each forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, name: str) -> Tensor:
        out: Tensor = getattr(self, name)(x)
        return out


@ranks(4)
def test_partial_sums_of_a_unit_that_the_last_micro_batch_skips(rank: int, size: int) -> None:
    """A unit used in the first micro-batch alone: its sum over replicas is made in the second."""
    mesh = mesh_of("hsdp")
    model: Any = Choice()
    for child in (model.a, model.b):
        fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    twin = Choice()
    for _ in range(2):
        model.set_requires_all_reduce(False)
        model(torch.full((1, 3), 1.0 + rank), "a").sum().backward()
        model.set_requires_all_reduce(True)
        model(torch.full((1, 3), 2.0 + rank), "b").sum().backward()
        for r in range(size):
            (twin(torch.full((1, 3), 1.0 + r), "a").sum() / size).backward()
            (twin(torch.full((1, 3), 2.0 + r), "b").sum() / size).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad)


@ranks(4)
def test_synchronisation_is_set_for_both_axes(rank: int, size: int) -> None:
    """``set_requires_gradient_sync`` says what happens on both axes, as torch's does."""
    for shard in (torch_fully_shard, fully_shard):
        torch.manual_seed(0)
        model: Any = shard(nn.Linear(4, 4), mesh=mesh_of("hsdp"))
        model.set_requires_all_reduce(False)
        model(torch.ones(1, 4)).sum().backward()
        assert {p.grad for p in model.parameters()} == {None}
        model.set_requires_gradient_sync(True)
        model(torch.ones(1, 4)).sum().backward()
        torch.testing.assert_close(full(model.weight.grad), torch.full((4, 4), 2.0))
    model.set_requires_all_reduce(False)
    with model.no_sync():
        model(torch.ones(1, 4)).sum().backward()
    model(torch.ones(1, 4)).sum().backward()  # what was set before holds again
    torch.testing.assert_close(full(model.weight.grad), torch.full((4, 4), 2.0))
    assert model.weight.grad is not None


@pytest.mark.parametrize("way", ["no sync", "no all-reduce", "in flight"])
@ranks(4)
def test_what_waits_is_forgotten_with_its_iteration(rank: int, size: int, way: str) -> None:
    """What waited is lost with the failed iteration, and nothing of it comes back."""
    model: Any = fully_shard(Pair(), mesh=mesh_of("hsdp"), plugins=[Checking()])
    model(torch.tensor(1.0), True, True).backward()
    model.zero_grad()
    with waiting(way, model):
        model(torch.tensor(1.0), True, True).backward()
    reset_together(model)
    model(torch.tensor(1.0), False, True).backward()
    assert model.large.grad is None
    torch.testing.assert_close(full(model.small.grad), torch.full((3, 3), 3.0))


@pytest.mark.parametrize("way", ["no sync", "no all-reduce"])
@ranks(4)
def test_what_waits_survives_that_parameters_are_replaced(rank: int, size: int, way: str) -> None:
    """Parameters replaced between micro-batches: gradients that wait are the group's."""
    model: Any = fully_shard(Pair(), mesh=mesh_of("hsdp"))
    with waiting(way, model):
        model(torch.tensor(1.0), True, False).backward()
    model.load_state_dict({n: v.clone() for n, v in model.state_dict().items()}, assign=True)
    model(torch.tensor(1.0), False, True).backward()
    for name, value in (("always", 2.0), ("large", 2.0), ("small", 3.0)):
        gradient = full(model.get_parameter(name).grad)
        torch.testing.assert_close(gradient, torch.full_like(gradient, value))


@pytest.mark.parametrize("kind", SHAPES)
@ranks(4)
def test_hooks_see_no_memory_of_other_steps(rank: int, size: int, kind: str) -> None:
    seen: list[Tensor] = []
    model: Any = fully_shard(Pair(), mesh=mesh_of(kind))
    model.set_all_reduce_hook(lambda total: seen.append(total.clone()))
    spoil(model)
    model(torch.tensor(1.0), False, False).backward()
    assert float(seen[0].abs().max()) > 1e19
    local = model.always.grad.to_local()
    assert float(seen[1].sum()) == float(local.sum())  # zero wherever nothing was reduced


def test_blanks_are_what_is_not_filled() -> None:
    assert blanks(10, []) == [(0, 10)]
    assert blanks(10, [(0, 10)]) == []
    assert blanks(10, [(6, 8), (1, 3), (3, 4)]) == [(0, 1), (4, 6), (8, 10)]
    assert blanks(4, [(0, 4), (1, 2)]) == []


# Zeros of what is not used ----------------------------------------------------------------------


class Optional(nn.Module):
    """Two layers, the second of which not every step uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, uses_second: bool = False) -> Tensor:
        x = self.first(x)
        return self.second(x) if uses_second else x


@pytest.mark.parametrize("codec", [False, True])
@ranks(2)
def test_zeros_follow_what_is_frozen_now(rank: int, size: int, codec: bool) -> None:
    """No step from here on gathers the layer, so no gather says that it was frozen."""
    model: Any = Optional()
    for module in (model.first, model.second, model):
        fully_shard(module, plugins=[Codecs()] if codec else [])
    model.set_reduce_scatter_unused_params(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x, weight = torch.ones(2, 5), model.second.weight
    for uses_second in (True, False):
        model(x, uses_second).sum().backward()
        assert weight.grad is not None
        optimizer.step()
        optimizer.zero_grad()
    for is_trained in (False, True, False):
        weight.requires_grad_(is_trained)
        before = full(weight.detach()).clone()
        model(x).sum().backward()
        if is_trained:
            assert torch.equal(full(weight.grad), torch.zeros(5, 5))
        else:
            assert weight.grad is None
        assert model.second.bias.grad is not None
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(full(weight.detach()), before) is not is_trained
