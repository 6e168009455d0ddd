"""Ranks in a collective of the model's own are woken, and all process groups work afterwards."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from toy_meeting import await_all

from polyshard import fully_shard
from polyshard._torch.gloo import backend_on_cpu
from polyshard.errors import PeerError
from polyshard_resilience.alarm.peers import Roll
from polyshard_testing import World, ranks
from polyshard_testing.world import RankError

WIDTH = 8
PATIENT_SECONDS = 10.0
"""Far below the time-out of the process group (60 s)."""
LATE_SECONDS = 3.0
"""More than ranks take to repair their groups."""
SHORT_SECONDS = 0.1
"""Less than a rank that is late takes to come."""
HEARD_SECONDS = 0.5
"""After which every rank has learned of a failure."""


class Beside(torch.autograd.Function):
    """A sum over another axis of the mesh, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return torch.as_tensor(collectives.all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.as_tensor(collectives.all_reduce(grads[0], "sum", ctx.group)), None


class Layer(nn.Module):
    """Communicates by itself; raises when told to."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.group = group
        self.raises = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.raises == "forward":
            raise ArithmeticError("on purpose")
        y: Tensor = Beside.apply(self.linear(x), self.group)  # type: ignore[no-untyped-call]
        if self.raises == "backward":
            y.register_hook(self._raise)
        if self.raises == "elsewhere":
            time.sleep(HEARD_SECONDS)
        return y

    def _raise(self, grad: Tensor) -> None:
        raise ArithmeticError("on purpose")


def build(mesh: DeviceMesh) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(mesh["tp"].get_group()) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def train(model: Any) -> Tensor:
    loss: Tensor = model(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)).square().sum()
    loss.backward()
    norm = torch.stack([p.grad.to_local().square().sum() for p in model.parameters()]).sum()
    model.zero_grad()
    dist.barrier()
    return torch.stack([loss.detach(), norm])


def works(model: Any, mesh: DeviceMesh, expected: Tensor) -> None:
    for group in (mesh["dp"].get_group(), mesh["tp"].get_group(), dist.group.WORLD):
        assert group is not None
        assert group.group_name
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == dist.get_world_size(group)
    dist.barrier()
    torch.testing.assert_close(train(model), expected, rtol=0, atol=0)
    await_all("works", dist.get_world_size())


def fail_and_mend(rank: int, size: int, phase: str) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = build(mesh)
    expected = train(model)
    await_all("trained", size)  # a failure in the next step would end this one for ranks behind
    for again, layer in enumerate(model):
        broken = rank == (again + 1) % size
        layer.raises = phase if broken else ""
        begin = time.monotonic()
        with pytest.raises(ArithmeticError if broken else RuntimeError) as caught:
            train(model)
        assert time.monotonic() - begin < PATIENT_SECONDS
        if not broken:
            said = "\n".join((str(caught.value), *getattr(caught.value, "__notes__", ())))
            assert f"rank {(again + 1) % size} failed" in said, said
            assert "reset_iter_state() on every rank" in said
            assert phase == "backward" or isinstance(caught.value, PeerError)
        layer.raises = ""
        model.reset_iter_state()
        model.zero_grad()
        works(model, mesh, expected)


def fail_out_of_step(rank: int, size: int) -> None:
    """Rank 1 has begun a collective with rank 0 that neither of them waits for."""
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = build(mesh)
    expected = train(model)
    await_all("trained", size)  # a failure in the next step would end this one for ranks behind
    for _ in range(2):
        model[1].raises = {0: "forward", 1: "elsewhere"}.get(rank, "")
        with pytest.raises(ArithmeticError if rank == 0 else PeerError):
            train(model)
        model[1].raises = ""
        model.reset_iter_state()
        model.zero_grad()
        works(model, mesh, expected)


def one_dies_and_one_is_late(rank: int, size: int) -> None:
    """Ranks 0 and 2 have repaired their group, and rank 2 asks who is left, before rank 1 comes."""
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = build(mesh)
    train(model)
    await_all("trained", size)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    stand = partial(dist.all_reduce, torch.ones(1), group=mesh["tp"].get_group())
    with pytest.raises(RuntimeError):  # rank 0 waits for rank 1 alone, and has to cut its groups
        stand() if rank == 0 else train(model)
    await_all("raised", size - 1)  # what one cuts later, others would see at the next failure
    if rank == 1:
        time.sleep(LATE_SECONDS)
    reset_without_the_late(model)
    absent = Roll(range(size)).call()
    assert absent is not None
    assert absent.said.keys() == {3}
    await_all("repaired", size - 1)
    for other, axis in {1: "tp", 2: "dp"}.items():
        if rank in (0, other):
            total = torch.ones(1)
            dist.all_reduce(total, group=mesh[axis].get_group())
            assert total.item() == 2


def reset_without_the_late(model: Any) -> None:
    """Wait for other ranks for no longer than a moment."""
    with mock.patch("polyshard_resilience.alarm.alarm.ACCOUNT_SECONDS", SHORT_SECONDS):
        model.reset_iter_state()


def some_come_late(rank: int, size: int, late: str) -> None:
    """The ranks ``late`` cut their groups when others have begun without them: all fail once more.

    With rank 0 alone, rank 1 waits for it in a collective then: why that connection broke, and to
    which rank, no other can say. With ranks 0 and 3, the others gather: each waits for a late rank,
    which must not wait for them to repair groups.
    """
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = build(mesh)
    expected = train(model)
    is_late = str(rank) in late

    def fail(*_: Any) -> None:
        await_all("there", size)
        if not is_late:
            raise ArithmeticError("on purpose")
        await_all("begun", size)
        time.sleep(HEARD_SECONDS)  # until others wait for it, in other groups
        dist.all_reduce(torch.ones(1))

    with (
        model[0].linear.register_forward_pre_hook(fail),
        pytest.raises(PeerError if is_late else ArithmeticError),
    ):
        train(model)
    if not is_late:
        reset_without_the_late(model)
        await_all("begun", size)
        begin = time.monotonic()
        with pytest.raises(PeerError):
            train(model)
        assert time.monotonic() - begin < PATIENT_SECONDS
    for _ in range(5):  # two, unless ranks are late once more
        with suppress(PeerError):
            model.reset_iter_state()
            break
    model.zero_grad()
    works(model, mesh, expected)


def run_alone(function: Any, *args: str) -> None:
    """On ranks with few process groups to repair."""
    world = World(4)
    try:
        world.run(function, *args)
    finally:
        world.close()


NOTED = pytest.mark.skipif(
    sys.gettrace() is not None, reason="notes are added by a tracer, of which there is one"
)


@pytest.mark.parametrize("phase", ["forward", pytest.param("backward", marks=NOTED)])
def test_a_collective_of_the_model(phase: str) -> None:
    run_alone(fail_and_mend, phase)


def test_a_collective_that_nobody_waits_for() -> None:
    run_alone(fail_out_of_step)


def test_a_survivor_that_is_late() -> None:
    with pytest.raises(RankError) as caught:
        run_alone(one_dies_and_one_is_late)
    assert str(caught.value).count("--- rank") == 1, str(caught.value)
    assert "the process ended without an answer" in str(caught.value)


@pytest.mark.parametrize("late", ["0", "03"])
def test_ranks_that_come_late_are_heard_by_all(late: str) -> None:
    run_alone(some_come_late, late)


@ranks(2)
def test_nothing_is_mended_that_nobody_cut(rank: int, size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (size,), mesh_dim_names=("dp",))
    model: Any = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh)
    before = backend_on_cpu(mesh.get_group())
    if rank == 0:
        model.forward = None
    with pytest.raises((TypeError, PeerError)):
        model(torch.ones(1, WIDTH)).sum().backward()
    model.reset_iter_state()
    assert backend_on_cpu(mesh.get_group()) is before


def mend_and_destroy(rank: int, size: int) -> int:
    gc.collect()  # the last call's model, with its groups
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = [mesh[name].get_group() for name in ("dp", "tp")]
    model = build(mesh)
    expected = train(model)
    await_all("trained", size)  # a failure in the next step would end this one for ranks behind
    if rank == 1:
        model[0].raises = "forward"
    with pytest.raises(RuntimeError if rank != 1 else ArithmeticError):
        train(model)
    model[0].raises = ""
    model.reset_iter_state()
    model.zero_grad()
    works(model, mesh, expected)
    for group in groups:
        dist.destroy_process_group(group)
    return sum(
        path.read_text() == "gloo_tcp_loop\n" for path in Path("/proc/self/task").glob("*/comm")
    )


def test_mended_groups_go_when_they_are_destroyed(world4: World) -> None:
    """Their connections have threads, which wake up a hundred times a second."""
    counts = [sum(world4.run(mend_and_destroy)) for _ in range(4)]
    assert counts[3] - counts[1] < 8, counts  # two groups of each rank and call would be 16
