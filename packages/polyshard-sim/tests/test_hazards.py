"""Each mistake with streams gives wrong numbers in at least one mode, and never where one waits.

The kernels that must lose or win a race are a chain of several: what runs is decided by the mode,
not by how long anything takes.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from polyshard_sim.testing import MODES, Mode, run, sim

TIMES = 20
SIZE = 4096


def slow(tensor: Tensor) -> Tensor:
    """A chain of kernels that takes longer than one."""
    for _ in range(8):
        tensor = tensor * 1
    return tensor


def two_streams(wait: bool) -> bool:
    side = sim().Stream()
    x = torch.zeros(SIZE, device="sim")
    side.wait_stream(sim().current_stream())
    with sim().stream(side):
        y = slow(x) + 1
        y.record_stream(sim().current_stream())
    if wait:
        sim().current_stream().wait_stream(side)
    right = (y + 0).cpu().eq(1).all().item()
    sim().synchronize()
    return bool(right)


def two_streams_reversed(wait: bool) -> bool:
    """As before, and the reader has the higher number: another order finds it."""
    reader = sim().Stream()
    number = float(reader.stream_id)  # the memory may hold what the last call left there
    y = slow(torch.zeros(SIZE, device="sim")) + number
    if wait:
        reader.wait_stream(sim().current_stream())
    with sim().stream(reader):
        got = (y + 0).cpu()
    sim().synchronize()
    return bool(got.eq(number).all().item())


def recorded_and_freed(wait: bool) -> bool:
    """To free what another stream uses orders nothing, though strict memory is overwritten then."""
    side = sim().Stream()
    x = torch.zeros(SIZE, device="sim")
    side.wait_stream(sim().current_stream())
    with sim().stream(side):
        y = slow(x) + 1
    y.record_stream(sim().current_stream())
    x.record_stream(side)
    del x
    if wait:
        sim().current_stream().wait_stream(side)
    right = (y + 0).cpu().eq(1).all().item()
    sim().synchronize()
    return bool(right)


def cross_stream_free(wait: bool) -> bool:
    side = sim().Stream()
    x = torch.ones(SIZE, device="sim")
    side.wait_stream(sim().current_stream())
    with sim().stream(side):
        y = slow(torch.ones(SIZE, device="sim")) + x
    if wait:
        x.record_stream(side)
    del x
    torch.full((SIZE,), 7.0, device="sim")  # takes the memory of x where it is free
    sim().current_stream().wait_stream(side)
    return bool(y.cpu().eq(2).all().item())


def pinned_rewritten(wait: bool) -> bool:
    host = torch.ones(SIZE).pin_memory()
    slow(torch.ones(SIZE, device="sim"))
    x = host.to("sim", non_blocking=True)
    if wait:
        sim().current_stream().synchronize()
    host.fill_(7)
    return bool(x.cpu().eq(1).all().item())


def read_early(wait: bool) -> bool:
    host = torch.zeros(SIZE).pin_memory()
    host.copy_(slow(torch.ones(SIZE, device="sim")), non_blocking=True)
    if wait:
        sim().synchronize()
    right = host.eq(1).all().item()
    sim().synchronize()
    return bool(right)


def collective(wait: bool) -> bool:
    rank, size = dist.get_rank(), dist.get_world_size()
    out = torch.zeros(SIZE * size, device="sim")
    sim().synchronize()
    work = dist.all_gather_into_tensor(
        out, torch.full((SIZE,), float(rank + 1), device="sim"), async_op=True
    )
    if wait:
        work.wait()
    got = (out + 0).cpu()
    work.wait()
    sim().synchronize()
    return bool(got[-1].item() == size)


HAZARDS = {
    f.__name__: f
    for f in (
        two_streams,
        two_streams_reversed,
        recorded_and_freed,
        cross_stream_free,
        pinned_rewritten,
        read_early,
        collective,
    )
}


def tally(rank: int, size: int) -> dict[str, tuple[int, int]]:
    """How often each is right, with its wait and without."""
    return {
        name: (
            sum(hazard(True) for _ in range(TIMES)),
            sum(hazard(False) for _ in range(TIMES)),
        )
        for name, hazard in HAZARDS.items()
    }


Tallies = dict[Mode, list[dict[str, tuple[int, int]]]]


@pytest.fixture(scope="module", params=[False, True], ids=["", "strict"])
def tallies(request: pytest.FixtureRequest) -> Tallies:
    strict: bool = request.param
    return {mode: run(tally, 2, mode=mode, jitter_us=300, strict=strict) for mode in MODES}


@pytest.mark.parametrize("name", HAZARDS)
def test_hazard(name: str, tallies: Tallies) -> None:
    right = {mode: [rank[name][0] for rank in ranks] for mode, ranks in tallies.items()}
    without = {mode: [rank[name][1] for rank in ranks] for mode, ranks in tallies.items()}
    assert right == {mode: [TIMES, TIMES] for mode in MODES}
    assert any(min(counts) == 0 for counts in without.values()), without
