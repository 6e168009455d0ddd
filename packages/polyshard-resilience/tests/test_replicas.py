"""Replica groups: sums over them, steps that are committed or undone, and groups that heal."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from toy_replicas import ToyManager, build, rows

from polyshard import describe, fully_shard
from polyshard.errors import CheckpointError, LifecycleError, SettingError, UnsupportedError
from polyshard_resilience import Replicas
from polyshard_testing import World, raises_in_step, ranks


def sharded(model: nn.Sequential, mesh: Any) -> nn.Sequential:
    for block in (model[0], model[1]):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def make(seed: int, optimizer: Any = torch.optim.AdamW, **given: Any) -> Any:
    """Two groups of two ranks: model, optimizer, scheduler, manager and replicas."""
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("groups", "shards")
    )
    model = sharded(build(seed), mesh["shards"])
    made = optimizer(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
    manager = ToyManager(mesh["groups"], **given)
    return model, made, scheduler, manager, Replicas(manager, model, made, also=[scheduler])


def run_step(made: Any, rank: int) -> bool:
    """One step on a batch that no other rank has."""
    model, _, scheduler, _, replicas = made
    with replicas.step() as step:
        torch.manual_seed(100 * step.number + rank)
        model(rows(step.number, rank)).square().mean().backward()
    if step.committed:
        scheduler.step()
    assert step.committed is not None
    return bool(step.committed)


def bits(*trees: Any) -> list[bytes]:
    """Every value, local parts of what is sharded."""
    local = [
        v.to_local() if isinstance(v, DTensor) else v for tree in trees for v in tree_leaves(tree)
    ]
    return [
        v.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        if isinstance(v, Tensor)
        else pickle.dumps(v)
        for v in local
    ]


def held(made: Any) -> list[bytes]:
    """Everything that a step changes; the order of buffers is that of the model."""
    model, optimizer, scheduler, *_ = made
    state = [optimizer.state[p] for p in model.parameters()]
    return bits(dict(model.state_dict()), state, scheduler.state_dict())


@ranks(4)
def test_gradients_are_those_of_replicas_in_a_mesh(rank: int, size: int) -> None:
    """HSDP over the same ranks is the oracle; both blocks have two groups."""
    made = make(0)
    model, _, _, manager, replicas = made
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    plain = sharded(build(0), mesh)
    steps = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for number in range(3):
        torch.manual_seed(rank)
        plain(rows(number, rank)).square().mean().backward()
        with replicas.step() as step:
            torch.manual_seed(rank)
            model(rows(number, rank)).square().mean().backward()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert bits(ours.grad) == bits(theirs.grad)
        assert (step.number, step.size, step.committed) == (number, 2, True)
        steps.step()
        steps.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    assert bits(dict(model.named_parameters())) == bits(dict(plain.named_parameters()))
    assert len(describe(model).groups) == 5
    assert len(manager.sums) == 3 * 5, "once a group and step, units of two groups included"


@ranks(4)
def test_a_step_that_fails_leaves_nothing(rank: int, size: int) -> None:
    """Buffers, random numbers, gradients and all else are those of a run that never tried it."""
    made, undisturbed = make(0, fails={1, 3, 4}), make(0)
    assert [run_step(made, rank) for _ in range(7)] == [1, 0, 1, 0, 0, 1, 1]
    for _ in range(4):
        run_step(undisturbed, rank)
    assert held(made) == held(undisturbed)


@ranks(4)
def test_failed_steps_return_random_numbers(rank: int, size: int) -> None:
    made = make(0, fails={1})
    model, *_, replicas = made
    drawn = []
    for _ in range(3):
        with replicas.step():
            drawn.append(torch.rand(1).item())
            model(rows(0, rank)).sum().backward()
    assert drawn[1] == drawn[2] != drawn[0]


OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda p, lr: torch.optim.AdamW(p, lr=lr, amsgrad=True),
    "sgd": torch.optim.SGD,
}


def heals(rank: int, size: int, name: str, steps: int) -> None:
    """Group 0 has made three steps alone, group 1 ``steps`` from other weights."""
    group = rank // 2
    made = make(group, OPTIMIZERS[name])
    model, optimizer, scheduler, manager, replicas = made
    manager.is_alone = True
    for _ in range(steps if group else 3):
        assert run_step(made, rank)
    manager.is_alone, manager.heals = False, {manager.begun + 1}
    with replicas.step() as step:
        assert step.number == 3
        assert same_in_all_groups(manager, held(made))
        model(rows(step.number, rank)).square().mean().backward()
    scheduler.step()
    assert run_step(made, rank)
    assert manager.committed == 5
    state = [optimizer.state[p] for p in model.parameters()]
    assert same_in_all_groups(manager, bits(dict(model.named_parameters()), state))
    assert not same_in_all_groups(manager, bits(dict(model.named_buffers()))), "of its own batches"


def same_in_all_groups(manager: ToyManager, found: list[bytes]) -> bool:
    every: list[Any] = [None] * manager.mesh.size()
    dist.all_gather_object(every, found, group=manager.mesh.get_group())
    return all(one == found for one in every)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_group_heals_from_another(world4: World, name: str) -> None:
    world4.run(heals, name, 0)


def test_a_group_that_is_behind_heals_too(world4: World) -> None:
    world4.run(heals, "adamw", 2)


@ranks(4)
def test_a_rank_reads_its_own_bytes_and_asks_no_other(rank: int, size: int) -> None:
    made = make(0)
    model, *_, replicas = made
    run_step(made, rank)
    if rank == 3:  # alone, in another thread
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(replicas.state_dict()))
        thread.start()
        thread.join(20)
        state = found[0]
        assert not any(isinstance(v, DTensor) for v in tree_leaves(state))
        local = sum(p.to_local().nbytes for p in model.parameters())
        assert sum(t.nbytes for t in state["parameters"].values()) == local
        moments = [s["parts"] for s in state["optimizers"][0]["states"]]
        assert sum(t.nbytes for t in tree_leaves(moments)) == 2 * local
        assert local < 0.6 * sum(p.nbytes for p in model.parameters())
    with replicas.step() as step:
        before = replicas.state_dict()
        kept = bits(before)
        model(rows(1, rank)).square().mean().backward()
        assert bits(before) == kept, "forward and backward change nothing of it"
    assert step.committed
    assert bits(before) != kept


@ranks(4)
def test_a_group_of_another_form_is_refused(rank: int, size: int) -> None:
    """Both ranks of a group say so, and have what they had."""
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("groups", "shards")
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4 + rank // 2), nn.BatchNorm1d(4 + rank // 2))
    fully_shard(model, mesh=mesh["shards"])
    manager = ToyManager(mesh["groups"], heals={0})
    replicas = Replicas(manager, model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = bits(dict(model.state_dict()))
    if rank < 2:
        manager.start_quorum()
    else:
        pattern = r"this rank has '0\.weight' \(5, 4\).*heals from has '0\.weight' \(4, 4\)"
        with pytest.raises(CheckpointError, match=pattern):
            replicas.step().__enter__()
    assert bits(dict(model.state_dict())) == before


class Asynchronous(ToyManager):
    _use_async_quorum = True


@ranks(2)
def test_misuse_is_refused(rank: int, size: int) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (1, 2), mesh_dim_names=("groups", "shards")
    )
    manager = ToyManager(mesh["groups"])
    model: Any = sharded(build(0), mesh["shards"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SettingError, match="use_async_quorum=False"):
        Replicas(Asynchronous(mesh["groups"]), model, optimizer)
    with pytest.raises(SettingError, match=r"Replicas takes torch\.optim\.Optimizer objects"):
        Replicas(manager, model, model)
    model[0].set_all_reduce_hook(lambda total: None)
    with pytest.raises(SettingError, match=r"group '0#0' has a hook"):
        Replicas(manager, model, optimizer)

    last = nn.Linear(4, 4)
    aside = nn.Sequential(nn.Linear(4, 4), last)
    fully_shard(aside, mesh=mesh["shards"], ignored_params={last.bias})
    with pytest.raises(UnsupportedError, match=r"'1\.bias' is trained and not sharded"):
        Replicas(manager, aside)


class Steps(nn.Module):
    """May leave out a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, both: bool) -> Tensor:
        x = self.first(x)
        return self.second(x) if both else x


@ranks(2)
def test_units_without_a_gradient_are_an_error(rank: int, size: int) -> None:
    """Another group may wait for theirs; frozen ones are not expected."""
    mesh = init_device_mesh(
        torch.get_default_device().type, (1, 2), mesh_dim_names=("groups", "shards")
    )
    torch.manual_seed(0)
    model = Steps()
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])
    manager = ToyManager(mesh["groups"])
    replicas = Replicas(manager, model, torch.optim.SGD(model.parameters(), lr=0.1))

    def steps(*, both: bool) -> None:
        with replicas.step():
            model(torch.ones(2, 4), both=both).sum().backward()

    before = bits(dict(model.state_dict()))
    with pytest.raises(LifecycleError, match=r"groups \['second'\] had no gradient"):
        steps(both=False)
    assert bits(dict(model.state_dict())) == before
    with raises_in_step(LifecycleError, "a backward outside of"):
        model(torch.ones(2, 4), both=True).sum().backward()
    model.reset_iter_state()  # type: ignore[operator]
    steps(both=True)
    assert manager.committed == 1
    model.second.requires_grad_(False)
    steps(both=False)
    assert manager.committed == 2


@ranks(2)
def test_a_block_that_raises_is_undone(rank: int, size: int) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (1, 2), mesh_dim_names=("groups", "shards")
    )
    model = sharded(build(0), mesh["shards"])
    replicas = Replicas(ToyManager(mesh["groups"]), model, torch.optim.SGD(model.parameters()))
    before = bits(dict(model.state_dict()))

    def fails() -> None:
        with step:
            model(rows(0, rank)).sum().backward()
            raise KeyError("a sample")

    step = replicas.step()
    with pytest.raises(KeyError, match="a sample"):
        fails()
    assert step.committed is False
    assert bits(dict(model.state_dict())) == before
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(LifecycleError, match="entered once"):
        step.__enter__()


@ranks(4)
def test_a_commit_that_raises_leaves_nothing_of_the_step(rank: int, size: int) -> None:
    """torchft gives up after its time-out; the user makes the step again."""
    undisturbed, made = make(0), make(0)
    run_step(undisturbed, rank)
    manager = made[3]
    commit = manager.should_commit
    manager.should_commit = lambda: (_ for _ in ()).throw(TimeoutError("no quorum"))
    with pytest.raises(TimeoutError, match="no quorum"):
        run_step(made, rank)
    manager.should_commit, manager.begun = commit, -1
    assert all(p.grad is None for p in made[0].parameters())
    run_step(made, rank)
    for ours, theirs in zip(made[0].parameters(), undisturbed[0].parameters(), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local())
