"""The process group: what collectives give, in which order they run, and how they fail."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from toy_meeting import await_all

from polyshard_resilience.alarm.current import current_alarm
from polyshard_sim.testing import MODES, run, sim
from polyshard_testing.world import RankError


def rows(rank: int, device: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(device)


def reductions(rank: int, size: int, device: str) -> list[Tensor]:
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = (rows(rank, device, 3 * size) * 10).to(dtype)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            y = x.clone()
            dist.all_reduce(y, op=op)
            results.append(y)
            out = torch.empty(3, dtype=dtype, device=device)
            dist.reduce_scatter_tensor(out, x, op=op)
            results.append(out)
    y = rows(rank, device, 5)
    dist.reduce(y, 1)
    if rank == 1:
        results.append(y)
    return results


def exchanges(rank: int, size: int, device: str) -> list[Tensor]:
    x = rows(rank, device, size, 2)
    whole = torch.empty(size * size, 2, device=device)
    dist.all_gather_into_tensor(whole, x)
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x)
    swapped = torch.empty_like(x)
    dist.all_to_all_single(swapped, x)
    uneven = torch.empty(size if rank == 0 else 0, 2, device=device)
    dist.all_to_all_single(
        uneven,
        x[:1].contiguous(),
        output_split_sizes=[1 if rank == 0 else 0] * size,
        input_split_sizes=[1] + [0] * (size - 1),
    )
    told = x.clone()
    dist.broadcast(told, 1)
    scattered = torch.empty(2, device=device)
    dist.scatter(scattered, list(x.unbind()) if rank == 0 else None, 0)
    gathered = [torch.empty_like(x) for _ in range(size)] if rank == 0 else []
    dist.gather(x, gathered or None, 0)
    dist.barrier()
    return [whole, *parts, swapped, uneven, told, scattered, *gathered]


def messages(rank: int, size: int, device: str) -> list[Tensor]:
    x, y, z = rows(rank, device, 4), *(torch.empty(4, device=device) for _ in range(2))
    after, before = (rank + 1) % size, (rank - 1) % size
    batch = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y, before)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    if rank == 0:
        dist.send(x, 1)
        dist.recv(z, 1)
    else:
        dist.recv(z, 0)
        dist.send(x, 0)
    return [y, z]


def compare(rank: int, size: int) -> None:
    for case in (reductions, exchanges, messages):
        if case is messages and size != 2:
            continue
        expected, got = case(rank, size, "cpu"), case(rank, size, "sim")
        assert len(expected) == len(got)
        for i, (one, other) in enumerate(zip(expected, got, strict=True)):
            assert torch.equal(one, other.cpu()), (case.__name__, i, one, other)


@pytest.mark.parametrize(("size", "mode"), [(2, "threads"), (3, "random"), (2, "highest")])
def test_values_are_gloos(size: int, mode: str) -> None:
    run(compare, size, mode=mode)


def averages(rank: int, size: int) -> None:
    x = torch.full((4,), float(rank), device="sim")
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert x.tolist() == [0.5] * 4
    out = torch.empty(2, device="sim")
    dist.reduce_scatter_tensor(
        out, torch.full((4,), rank + 1.0, device="sim"), op=dist.ReduceOp.AVG
    )
    assert out.tolist() == [1.5] * 2
    whole = torch.tensor([rank, rank + 3, -3 * rank], device="sim")
    dist.all_reduce(whole, op=dist.ReduceOp.AVG)
    assert whole.tolist() == [0, 3, -1], "NCCL drops the rest"


def booleans(rank: int, size: int) -> None:
    """Sums are what any rank holds; as bytes they were no booleans any more."""
    x = torch.tensor([True, rank == 0, False], device="sim")
    dist.all_reduce(x)
    assert x.tolist() == [True, True, False]
    assert x.view(torch.uint8).tolist() == [1, 1, 0]
    out = torch.zeros(1, dtype=torch.bool, device="sim")
    dist.reduce_scatter_tensor(out, torch.tensor([True, rank == 1], device="sim"))
    assert out.view(torch.uint8).tolist() == [1]
    with pytest.raises(RuntimeError, match="booleans have no average"):
        dist.all_reduce(x, op=dist.ReduceOp.AVG)


def uneven(rank: int, size: int) -> None:
    """Each rank has as many elements as its number; what does not fit is refused, not awaited."""
    numels = [3 * root for root in range(size)]
    parts = [torch.full((n,), -1.0, device="sim") for n in numels]
    dist.all_gather(parts, torch.full((numels[rank],), 7.0 + rank, device="sim"))
    assert [part.tolist() for part in parts] == [[7.0 + r] * n for r, n in enumerate(numels)]
    with pytest.raises(RuntimeError, match="does not fit into"):
        dist.all_gather(parts, torch.zeros(5, device="sim"))
    inputs = [torch.ones(n + 1, device="sim") for n in numels]
    with pytest.raises(RuntimeError, match="of other sizes"):
        dist.reduce_scatter(torch.ones(2, device="sim"), inputs)


def splits(rank: int, size: int) -> None:
    """Sums of sizes that are not the tensor's: what is longer would be read beyond its end."""
    x = torch.ones(4, device="sim")
    for rows, given in ((6, [2, 2]), (3, [2, 2]), (4, [4])):
        out = torch.zeros(rows, device="sim")
        with pytest.raises(RuntimeError, match=r"[Ss]plit"):
            dist.all_to_all_single(out, x, output_split_sizes=given, input_split_sizes=[2, 2])


def dropped(rank: int, size: int) -> None:
    """A work that is not waited for keeps its tensors until it has ended."""
    out = torch.zeros(2 * size, device="sim")
    for turn in range(5):
        x = torch.full((2,), float(turn + rank), device="sim")
        dist.all_gather_into_tensor(out, x.clone(), async_op=True)
        torch.full_like(x, 7.0)  # takes the memory of the clone, were it free
        sim().synchronize()
        assert out.tolist() == [float(turn + r) for r in range(size) for _ in range(2)]


def coalesced(rank: int, size: int) -> None:
    from torch.distributed.distributed_c10d import _coalescing_manager

    inputs = [torch.full((2,), rank + 10.0 * k, device="sim") for k in range(3)]
    outputs = [torch.empty(2 * size, device="sim") for _ in inputs]
    with _coalescing_manager(device=torch.device("sim:0"), async_ops=True) as manager:
        for out, x in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(out, x)
    manager.wait()
    assert [out.tolist() for out in outputs] == [
        [10.0 * k, 10.0 * k, 1 + 10.0 * k, 1 + 10.0 * k] for k in range(3)
    ]
    with _coalescing_manager(device=torch.device("sim:0")):
        for out, x in zip(outputs, inputs, strict=True):
            dist.reduce_scatter_tensor(x, out)
    assert inputs[2].tolist() == ([40.0] * 2 if rank == 0 else [42.0] * 2)


def ordered(rank: int, size: int) -> None:
    """Of one communicator on two streams: ranks that start streams differently agree."""
    first, second = torch.ones(8, device="sim"), torch.ones(8, device="sim") * 3
    sim().synchronize()
    side = sim().Stream()
    dist.all_reduce(first)
    with sim().stream(side):
        dist.all_reduce(second)
    sim().synchronize()
    assert (first[0].item(), second[0].item()) == (size, 3 * size)


def does_not_hold_the_host(rank: int, size: int) -> None:
    if rank == 0:
        work = dist.all_reduce(torch.ones(2, device="sim"), async_op=True)
        assert work.wait()  # orders streams
        assert not work.is_completed()
        dist.barrier(group=_cpu_group())
        sim().synchronize()
        assert work.is_completed()
    else:
        dist.barrier(group=_cpu_group())
        dist.all_reduce(torch.ones(2, device="sim"))


def _cpu_group() -> Any:
    return dist.new_group(backend="gloo")


def all_in_one(rank: int, size: int) -> None:
    for case in (
        averages,
        booleans,
        uneven,
        splits,
        dropped,
        coalesced,
        ordered,
        does_not_hold_the_host,
    ):
        case(rank, size)


@pytest.mark.parametrize("mode", MODES)
def test_behaves_like_nccl(mode: str) -> None:
    run(all_in_one, 2, mode=mode)


def aborted(rank: int, size: int) -> None:
    group = dist.new_group(backend="simccl")
    if rank == 0:
        work = dist.all_reduce(torch.ones(2, device="sim"), group=group, async_op=True)
        time.sleep(0.1)
        assert not work.is_completed()
        group._get_backend(torch.device("sim")).abort()
        sim().synchronize()
        with pytest.raises(dist.DistBackendError, match="aborted"):
            work.wait()
        with pytest.raises(dist.DistBackendError, match="aborted"):
            dist.all_reduce(torch.ones(2, device="sim"), group=group)
    x = torch.ones(2, device="sim")
    dist.all_reduce(x)  # other groups continue
    assert x.tolist() == [2, 2]


def aborted_together(rank: int, size: int) -> None:
    """To abort one group frees memory, behind what never ends of another; abort() of that helps."""
    idle, stuck = (dist.new_group(backend="simccl") for _ in range(2))
    dist.all_reduce(torch.ones(2, device="sim"), group=idle)
    sim().synchronize()
    if rank == 0:
        dist.all_reduce(torch.ones(2, device="sim"), group=stuck)
        backends = [group._get_backend(torch.device("sim")) for group in (idle, stuck)]
        threads = [Thread(target=each.abort, daemon=True) for each in backends]
        threads[0].start()
        threads[0].join(0.3)
        assert threads[0].is_alive()
        threads[1].start()
        for each in threads:
            each.join(20.0)
            assert not each.is_alive()
    dist.barrier(group=_cpu_group())


def timed_out(rank: int, size: int) -> None:
    group = dist.new_group(backend="simccl", timeout=timedelta(seconds=1))
    if rank == 0:
        dist.all_reduce(torch.ones(2, device="sim"), group=group, async_op=True)
        with pytest.raises(
            dist.DistBackendError, match="all_reduce number 1 of rank 0 did not end"
        ):
            sim().synchronize()
    dist.barrier()


def apart(rank: int, size: int) -> None:
    """Calls that do not match never end, even where their bytes would fit."""
    for kind in ("operation", "size"):
        group = dist.new_group(backend="simccl")
        x, y = torch.ones(4, device="sim"), torch.ones(6, device="sim")
        if rank == 0 and kind == "operation":
            dist.broadcast(x, 0, group=group)
        else:
            dist.all_reduce(y if rank and kind == "size" else x, group=group)
        event = sim().Event()
        event.record()
        time.sleep(0.1)
        assert not event.query()
        dist.barrier(group=_cpu_group())
        group._get_backend(torch.device("sim")).abort()
        sim().synchronize()


def killed(rank: int, size: int) -> None:
    """The others of a collective are not told, as with NCCL over NVLink."""
    x = torch.ones(2, device="sim")
    dist.all_reduce(x)
    sim().synchronize()
    await_all("summed", size)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(x, async_op=True)
    time.sleep(0.1)
    is_over = work.is_completed()
    # The device ends nothing by itself. polyshard-resilience, which all ranks of tests have, may.
    assert not is_over or current_alarm().report is not None
    world: Any = dist.group.WORLD
    world._get_backend(torch.device("sim")).abort()
    sim().synchronize()


def test_a_rank_that_is_killed_leaves_the_others_waiting() -> None:
    with pytest.raises(RankError, match="rank 1") as caught:
        run(killed, 2)
    assert str(caught.value).count("--- rank") == 1, caught.value


@pytest.mark.parametrize("mode", ["threads", "random"])
@pytest.mark.parametrize("case", [aborted, aborted_together, timed_out, apart])
def test_failures(mode: str, case: Any) -> None:
    run(case, 2, mode=mode)
