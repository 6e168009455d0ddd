"""Modelled times of the virtual clock against arithmetic by hand, to the bit."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import polyshard_sim
from polyshard_sim.clock import (
    HOST,
    Hardware,
    Protocol,
    Timeline,
    host_time_us,
    rank_of,
    record,
)
from polyshard_sim.testing import Ranks, run, sim

RANKS, WIDTH, TOKENS, START, HOP = 8, 64, 16, 10.0, 1.0
# A product of these sizes takes 16 x 64 x 64 x 2 = 131072 operations. Bytes cost nothing but where
# a collective passes them on, and nothing takes the host any time.
HARDWARE = Hardware(
    half_flops_per_second=2048e6,
    float_flops_per_second=1024e6,
    efficiency=1.0,
    memory_bytes_per_second=float("inf"),
    host_bytes_per_second=512e6,
    nvlink_bytes_per_second=1024e6,
    network_bytes_per_second=32e6,
    launch_seconds=0.0,
    protocols=(Protocol(START, HOP, 0.0, 1.0),),
)
PRODUCT = 2 * TOKENS * WIDTH * WIDTH / 1024
"""Microseconds: 128."""
GATHER = START + 7 * HOP + 4 * WIDTH * WIDTH * 7 / 8 / 1024
"""Of a square matrix in float32: 17 and 14 microseconds."""
ENGINES = {"torch": "torch.distributed.fsdp", "polyshard": "polyshard"}


@pytest.fixture(scope="module")
def rank() -> Iterator[Ranks]:
    """A process with this clock."""
    ranks = Ranks(1, clock=HARDWARE)
    yield ranks
    ranks.close()


def microseconds(timeline: Timeline, stream: int) -> dict[str | tuple[str, int], float]:
    """Of a stream, by name, and by what was waited for."""
    found: dict[str | tuple[str, int], float] = {}
    for span in timeline.spans:
        if span.stream == stream:
            key = span.name if span.awaited is None else (span.name, span.awaited)
            found[key] = found.get(key, 0.0) + span.duration_us
    return found


def beside(_: int, __: int, products: int) -> tuple[float, dict[Any, float]]:
    """A gather beside products that do not need it, then one that does."""
    matrix, rows = (torch.empty(n, WIDTH, device="sim") for n in (WIDTH, TOKENS))
    lane = sim().Stream()
    with rank_of(RANKS), record() as timeline:
        begin = host_time_us()
        with sim().stream(lane):
            dist.all_gather_into_tensor(matrix.view(-1), matrix.view(-1)[: WIDTH * WIDTH // RANKS])
        for _ in range(products):
            rows @ matrix
        sim().current_stream().wait_stream(lane)
        rows @ matrix
        assert not sim().current_stream().query(), "in the host's time it has not begun"
        sim().synchronize()
        taken = host_time_us() - begin
    found = microseconds(timeline, sim().current_stream().stream_id)
    return taken, {"lane": lane.stream_id, **found}


def test_compute_hides_a_transfer_or_waits_for_it(rank: Ranks) -> None:
    taken, found = rank.run(beside, 1, timeout=None)[0]
    assert GATHER == 31.0 < PRODUCT == 128.0
    assert (taken, found["aten::mm"]) == (2 * PRODUCT, 2 * PRODUCT)
    assert ("wait", found["lane"]) not in found
    taken, found = rank.run(beside, 0)[0]
    assert taken == GATHER + PRODUCT
    assert found["wait", found["lane"]] == GATHER


def durations(_: int, __: int) -> None:
    with rank_of(64), record() as timeline:
        assert dist.get_world_size() == 64
        value = torch.empty(64 * 1024, device="sim")
        dist.all_reduce(value)
        dist.barrier(device_ids=[0])
        pairs = init_device_mesh("sim", (8, 8), mesh_dim_names=("nodes", "ranks"))
        for axis in ("nodes", "ranks"):
            dist.all_reduce(value, group=pairs.get_group(axis))
        value.cpu()
        query = torch.empty(1, 2, 16, 8, device="sim", dtype=torch.bfloat16)
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
        a, b = (torch.empty(n, 32, device="sim", dtype=torch.bfloat16) for n in (16, 32))
        torch.addmm(a, a, b, out=torch.empty_like(a))
    found = [span.duration_us for span in timeline.spans if span.awaited is None]
    sent = 2 * value.nbytes
    assert found == [
        # 8 nodes have 8 x 32 bytes a microsecond each between their ranks: less than NVLink
        START + 2 * 56 * HOP + sent * 63 / 64 / 256,
        START + 56 * HOP,
        START + sent * 7 / 8 / 32,  # one rank of each node: its own link, no hop of a node
        START + 2 * 7 * HOP + sent * 7 / 8 / 1024,
        value.nbytes / 512,
        2 * 2 * 2 * 16 * 16 * 8 / 2048,
        2 * 16 * 32 * 32 / 2048,
    ]


def test_collectives_copies_and_products(rank: Ranks) -> None:
    rank.run(durations)


def between_events(_: int, __: int) -> float:
    matrix, rows = (torch.empty(n, WIDTH, device="sim") for n in (WIDTH, TOKENS))
    begin, end = (sim().Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(3):
        rows @ matrix
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds


def test_events_tell_the_time_between_them(rank: Ranks) -> None:
    assert rank.run(between_events) == [3 * PRODUCT / 1000]


def late_host(_: int, __: int) -> tuple[float, dict[Any, float]]:
    rows, matrix = torch.empty(TOKENS, WIDTH, device="sim"), torch.empty(WIDTH, WIDTH, device="sim")
    sim().synchronize()
    begin = host_time_us()
    with record() as timeline:
        for _ in range(3):
            rows @ matrix
        sim().synchronize()
    return host_time_us() - begin, microseconds(timeline, sim().current_stream().stream_id)


def test_a_stream_is_idle_until_the_host_launches() -> None:
    slow = replace(HARDWARE, launch_seconds=160e-6)
    taken, found = run(late_host, 1, clock=slow)[0]
    assert taken == 3 * 160 + PRODUCT
    assert found == {"aten::mm": 3 * PRODUCT, ("idle", HOST): 160 + 2 * (160 - PRODUCT)}
    quick = replace(HARDWARE, launch_seconds=8e-6, memory_bytes_per_second=64e6)
    taken, found = run(late_host, 1, clock=quick)[0]
    moved = 4 * (2 * TOKENS * WIDTH + WIDTH * WIDTH) / 64  # is more than its operations
    assert (taken, found["aten::mm"]) == (8 + 3 * moved, 3 * moved)


def layers(engine: str, count: int, *, whole: bool = False) -> nn.Sequential:
    library: Any = importlib.import_module(ENGINES[engine])
    mesh = init_device_mesh("sim", (RANKS,))
    with torch.device("sim"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))
    for layer in () if whole else model:
        library.fully_shard(layer, mesh=mesh)
    library.fully_shard(model, mesh=mesh)
    return model


def forward(_: int, __: int, engine: str, tokens: int) -> tuple[float, dict[Any, float]]:
    """Of four units."""
    with rank_of(RANKS), torch.no_grad():
        model, x = layers(engine, 4), torch.empty(tokens, WIDTH, device="sim")
        model(x)
        sim().synchronize()
        begin = host_time_us()
        with record() as timeline:
            model(x)
            sim().synchronize()
        taken = host_time_us() - begin
    return taken, microseconds(timeline, sim().current_stream().stream_id)


@pytest.mark.parametrize("engine", ENGINES)
def test_units_are_gathered_beside_compute(rank: Ranks, engine: str) -> None:
    taken, found = rank.run(forward, engine, TOKENS)[0]
    assert (taken, found["aten::mm"]) == (GATHER + 4 * PRODUCT, 4 * PRODUCT)
    short = PRODUCT / TOKENS  # one token: 8 microseconds
    taken, found = rank.run(forward, engine, 1)[0]
    assert (taken, found["aten::mm"]) == (4 * GATHER + short, 4 * short)


def one_unit(_: int, __: int, engine: str) -> tuple[float, dict[str, float]]:
    """A step."""
    with rank_of(RANKS):
        model, x = layers(engine, 1, whole=True), torch.empty(TOKENS, WIDTH, device="sim")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            sim().synchronize()
            begin = host_time_us()
            with record() as timeline:
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                sim().synchronize()
        taken = host_time_us() - begin
    found = {
        span.name: span.duration_us
        for span in timeline.spans
        if span.name in {"all_gather", "reduce_scatter"}
    }
    return taken, found


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_of_one_unit(rank: Ranks, engine: str) -> None:
    taken, found = rank.run(one_unit, engine)[0]
    # No gradient of its input is asked for; a reduce-scatter passes on what a gather does.
    assert taken == GATHER + 2 * PRODUCT + GATHER
    assert found == {"all_gather": GATHER, "reduce_scatter": GATHER}


def test_a_device_without_a_clock_says_so() -> None:
    with pytest.raises(polyshard_sim.SimError, match=r"enable\(clock=Hardware\(\)\)"):
        host_time_us()


def test_nothing_runs_beside_a_clock() -> None:
    with pytest.raises(ValueError, match="leave out mode, seed, jitter_us and strict"):
        polyshard_sim.enable("lowest", clock=HARDWARE)


def test_the_fastest_protocol_is_used() -> None:
    rings = Hardware().rings(range(16))
    assert rings == [
        (8.4, 14 * 3.4 + 14.0, 400e9 / 1e6),
        (14.0, 14 * 1.9 + 4.0, 400e9 * 0.92 / 1e6),
    ]
    assert Hardware().rings([3]) == [(0.0, 0.0, 450e3), (0.0, 0.0, 450e3 * 0.92)]
