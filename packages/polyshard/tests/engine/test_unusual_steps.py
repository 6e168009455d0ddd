"""Steps that few loops make, against one process."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from toy_meeting import await_all
from toy_models import full
from toy_twins import linear, pair, same_gradients, two_of
from typing_extensions import override

from polyshard import MixedPrecisionPolicy, fully_shard
from polyshard.engine.root import units_below
from polyshard.module.schedule import own_unit
from polyshard_testing import ranks


class Region(nn.Module):
    """Recomputes two units of which the loss uses the first."""

    def __init__(self) -> None:
        super().__init__()
        self.top = linear()
        self.used = nn.Sequential(linear(), nn.Tanh(), linear())
        self.unused = nn.Sequential(linear(), nn.Tanh(), linear())

    def region(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x), self.unused(x)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.region, self.top(x), use_reentrant=False)[0]
        return out


@ranks(2)
def test_a_recomputation_may_stop_early(rank: int, size: int) -> None:
    """torch ends it by an exception within the second unit, while the first one's backward runs."""
    ours, theirs = two_of(Region)
    for module in (ours.used, ours.unused, ours):
        fully_shard(module)
    for _ in range(2):
        for model in (ours, theirs):
            model(torch.linspace(-1, 1, 8).view(2, 4)).sum().backward()
    same_gradients(ours, theirs)
    assert all(isinstance(p, DTensor) for p in ours.parameters())  # nothing is left gathered


@ranks(2)
def test_a_step_sees_all_gradients_though_backwards_may_follow(rank: int, size: int) -> None:
    ours, theirs = two_of(pair)
    fully_shard(ours[0])
    fully_shard(ours)
    ours.set_is_last_backward(False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs)]
    for x in (torch.ones(1, 4), torch.zeros(1, 4)):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            model(x).sum().backward()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                optimizer.step()
        same_gradients(ours, theirs)
        for optimizer in optimizers:
            optimizer.zero_grad()


@ranks(2)
def test_a_conversion_between_backwards(rank: int, size: int) -> None:
    ours, theirs = two_of(pair)
    fully_shard(ours[0])
    fully_shard(ours)
    ours.set_is_last_backward(False)
    for model in (ours, theirs):
        model(torch.ones(1, 4)).sum().backward()
        model.to(torch.float64)
    ours.set_is_last_backward(True)
    for model in (ours, theirs):
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    same_gradients(ours, theirs)


@pytest.mark.parametrize("is_frozen", [True, False], ids=["unfreeze", "freeze"])
@ranks(2)
def test_kept_parameters_may_be_frozen_between_backwards(
    rank: int, size: int, is_frozen: bool
) -> None:
    """They stay gathered, so that no gather tells the unsharded ones."""
    ours, theirs = two_of(pair)
    for module in (ours[0], ours):
        fully_shard(module, reshard_after_forward=False)
    held = [next(iter(m.parameters())) for m in (ours, theirs)]
    ours.set_reshard_after_backward(False)
    for micro in range(2):
        ours.set_requires_gradient_sync(micro == 1)
        for model, parameter in zip((ours, theirs), held, strict=True):
            parameter.requires_grad_(is_frozen == bool(micro))
            model(torch.ones(1, 4)).sum().backward()
    for module in (ours[0], ours):
        module.reshard()
    same_gradients(ours, theirs)


class First(nn.Linear):
    @override
    def forward(self, x: Tensor, ignored: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class Ignores(nn.Module):
    """A unit that does not use its second input."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.side, self.main = linear(), linear(), First(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.main(self.before(x), self.side(x))
        return out


@ranks(2)
def test_an_input_that_a_unit_ignores_gets_no_gradient(rank: int, size: int) -> None:
    """Zeros would decay the weights of what made it."""
    ours, theirs = two_of(Ignores)
    fully_shard(ours.main)
    fully_shard(ours)
    for model in (ours, theirs):
        model(torch.ones(1, 4)).sum().backward()
    assert theirs.side.weight.grad is None
    same_gradients(ours, theirs)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


@pytest.mark.parametrize("name", ["first.weight", "second.weight"])
@ranks(2)
def test_a_shared_parameter_may_be_assigned_under_any_name(rank: int, size: int, name: str) -> None:
    model: Any = fully_shard(Tied())
    value = torch.full_like(model.state_dict()[name], 7.0)
    model.load_state_dict({name: value}, strict=False, assign=True)
    model(torch.ones(1, 4))
    assert model.first.weight is model.second.weight
    assert full(model.first.weight.detach()).eq(7.0).all()


# Freezing, and zeros ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_frozen", [True, False], ids=["unfreeze", "freeze"])
@ranks(2)
def test_what_is_frozen_while_gathered_stays_frozen(rank: int, size: int, is_frozen: bool) -> None:
    """An evaluation left the unsharded parameters registered."""
    ours, theirs = two_of(pair)
    for model in (ours, theirs):
        model[0].requires_grad_(not is_frozen)
    for module in (ours[0], ours):
        fully_shard(module, reshard_after_forward=False)
    with torch.no_grad():
        ours(torch.ones(1, 4))
    for model in (ours, theirs):
        model[0].requires_grad_(is_frozen)
    for _ in range(2):
        for model in (ours, theirs):
            model(torch.ones(1, 4)).sum().backward()
        same_gradients(ours, theirs)
    ours.unshard()
    for model in (ours, theirs):
        model[1].requires_grad_(False)
    ours.reshard()
    assert not any(p.requires_grad for p in ours[1].parameters())


@pytest.mark.parametrize("to_none", [True, False])
@ranks(2)
def test_gradients_are_zeroed_between_forward_and_backward(
    rank: int, size: int, to_none: bool
) -> None:
    """The root is gathered then, and its sharded parameters are not among ``parameters()``."""
    ours, theirs = two_of(pair)
    fully_shard(ours[0])
    fully_shard(ours)
    for step in range(3):
        for model in (ours, theirs):
            loss = model(torch.full((1, 4), step + 1.0)).sum()
            model.zero_grad(set_to_none=to_none)
            loss.backward()
        same_gradients(ours, theirs)


@ranks(2)
def test_zeros_of_one_module_are_not_anothers(rank: int, size: int) -> None:
    """Of one unit; and of a class whose ``zero_grad`` takes nothing."""

    class Own(nn.Linear):
        def zero_grad(self) -> None:  # type: ignore[override]
            super().zero_grad()

    ours, theirs = two_of(lambda: nn.Sequential(Own(4, 4), linear(), linear()))
    fully_shard([ours[0], ours[1]])
    fully_shard(ours)
    for model in (ours, theirs):
        model(torch.ones(1, 4)).sum().backward()
        model[0].zero_grad()
    same_gradients(ours, theirs)


# Backwards that a rank leaves out -----------------------------------------------------------------


@ranks(2)
def test_a_rank_may_leave_out_a_backward_that_reduces_nothing(rank: int, size: int) -> None:
    """The other has promised that nothing is written until the next, and compares nothing."""
    ours, theirs = two_of(linear)
    model: Any = fully_shard(ours, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    x = torch.ones(1, 4)
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        loss = model(x * (micro + 1)).sum()
        if micro or rank == 0:
            loss.backward()
    model.reshard()
    (theirs(x) / 2 + theirs(2 * x)).sum().backward()  # a half of the ranks has the first loss
    same_gradients(model, theirs)


@ranks(2)
def test_ranks_send_one_dtype_though_one_left_a_backward_out(rank: int, size: int) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model: Any = fully_shard(linear(), mp_policy=policy)
    model(torch.ones(1, 4)).sum().backward()
    model.zero_grad()
    with model.no_sync():
        model.reset_iter_state()  # as after an error of both
        loss = model(torch.ones(1, 4)).sum()
        if rank == 0:
            loss.backward()
        else:
            model.reshard()
    (group,) = own_unit(model).groups
    wires: list[torch.dtype] = []
    reducing = group.gradients.reducing

    def noted(*given: Any) -> torch.dtype:
        wires.append(reducing(*given))
        found: list[Any] = [None] * size
        dist.all_gather_object(found, wires[-1])
        assert len(set(found)) == 1, found  # before anything is sent
        return wires[-1]

    with mock.patch.object(group.gradients, "reducing", noted):
        model(torch.ones(1, 4)).sum().backward()
    assert wires == [torch.float32]
    assert full(model.weight.grad)[0, 0] == 1.5


@ranks(2)
def test_a_first_backward_that_is_left_out_promises_nothing(rank: int, size: int) -> None:
    """Ranks watch steps from one moment on, whatever each has done."""
    ours, theirs = two_of(linear)
    model: Any = fully_shard(ours)
    x = torch.ones(1, 4)
    with model.no_sync():
        loss = model(x).sum()
        if rank == 0:
            loss.backward()
        else:
            model.reshard()
        first, second = model(x).sum(), model(2 * x).sum()
        (first + second).backward()
    model(x).sum().backward()
    (theirs(x) / 2 + 2 * theirs(x) + theirs(2 * x)).sum().backward()
    same_gradients(model, theirs)


@ranks(2)
def test_weights_written_after_a_forward_without_backward_are_seen(rank: int, size: int) -> None:
    ours, theirs = two_of(pair)
    fully_shard(ours[0])
    fully_shard(ours)
    x = torch.ones(1, 4)
    with ours.no_sync():
        ours(x).sum().backward()  # steps are watched from here on
    ours(x).sum().backward()
    ours.zero_grad()
    with ours.no_sync():
        ours(x)
        ours[0].reshard()
        parameters = [
            p.parameter
            for _, _, unit in units_below(ours)
            for group in unit.groups
            for p in group.shards.parameters
        ]
        torch._foreach_mul_([p.detach() for p in parameters], 2.0)
        found = ours(x)
    with torch.no_grad():
        torch._foreach_mul_(list(theirs.parameters()), 2.0)
    torch.testing.assert_close(found, theirs(x))


# Sums that lack those of replicas -----------------------------------------------------------------


def on_replicas() -> tuple[Any, Any]:
    """A model on two replicas of two ranks, and how a micro-batch goes."""
    torch.manual_seed(0)
    kind = torch.get_default_device().type
    mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("replicas", "shards"))
    model: Any = fully_shard(linear(), mesh=mesh)

    def micro(is_last: bool) -> None:
        model.set_requires_all_reduce(is_last)
        model(torch.ones(1, 4)).sum().backward()

    return model, micro


@ranks(4)
def test_partial_sums_are_kept_where_a_step_is_rolled_back(rank: int, size: int) -> None:
    model, micro = on_replicas()
    context = own_unit(model).context
    micro(False)
    micro(True)
    expected = full(model.weight.grad)
    for _ in range(2):
        model.zero_grad()
        micro(False)
        put_back = context.remember()
        context.reset()
        put_back()
        micro(True)
        assert torch.equal(full(model.weight.grad), expected)
        model.zero_grad()
        put_back = context.remember()
        micro(False)
        context.reset()
        put_back()
        micro(False)
        micro(True)
        assert torch.equal(full(model.weight.grad), expected)


# Transfers that failed ----------------------------------------------------------------------------


class Torn:
    """A transfer whose peer is gone; another peer may still write."""

    def wait(self) -> None:
        raise ConnectionError("Connection reset by peer")


@ranks(2)
def test_memory_of_a_transfer_that_failed_is_not_given_away(rank: int, size: int) -> None:
    model: Any = fully_shard(linear())
    x = torch.ones(1, 4)
    model(x).sum().backward()
    (group,) = own_unit(model).groups
    transport: Any = group.transport
    started = type(transport).begin

    def begin(self: Any, tag: int) -> Any:
        works = started(self, tag)
        whole = works.wait

        def wait() -> None:
            whole()
            await_all("gathered", size)  # none is told of another's failure before it has its own
            Torn().wait()

        works.wait = wait
        return works

    with mock.patch.object(type(transport), "begin", begin), pytest.raises(ConnectionError):
        model(x)
    assert group.is_sharded
    storage = group.prepare().buffer.tensor.untyped_storage()
    assert storage.nbytes() > 0
    model.reset_iter_state()
    model(x).sum().backward()
    assert storage.nbytes() == 0


@ranks(2)
def test_memory_of_a_gather_that_could_not_begin_goes_back(rank: int, size: int) -> None:
    model: Any = fully_shard(linear())
    x = torch.ones(1, 4)
    model(x).sum().backward()
    (group,) = own_unit(model).groups
    storage = group.prepare().buffer.tensor.untyped_storage()

    def start(*_: Any) -> Any:
        await_all("gathers", size)  # none is told of another's failure before it has its own
        raise ConnectionError("no route")

    with (
        mock.patch.object(type(group.prepare().gather.route), "start", start),
        pytest.raises(ConnectionError, match="no route"),
    ):
        model(x)
    assert storage.nbytes() == 0
    model.reset_iter_state()
    model(x).sum().backward()
    assert storage.nbytes() == 0
