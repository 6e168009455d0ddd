"""Every transport against arithmetic done by hand."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from polyshard import fully_shard
from polyshard.transport.base import Extents, GatherPiece, Transport
from polyshard.transport.collective import CollectiveTransport
from polyshard.transport.gloo import GlooTransport
from polyshard.transport.local import LocalTransport
from polyshard_testing import World, ranks

KINDS = ["gloo", "collective"]
SIZES = (10, 0, 3, 1)
"""Full pieces: uneven over 2 and 4 ranks, empty, and shorter than the world."""


def connect(kind: str) -> Transport:
    group = dist.group.WORLD
    assert group is not None
    if kind == "collective":
        return CollectiveTransport(group, torch.get_default_device())
    return GlooTransport(group)


def extents(size: int, world: int) -> Extents:
    chunk = -(-size // world)
    return Extents(chunk, tuple(max(0, min(chunk, size - r * chunk)) for r in range(world)))


def gather(rank: int, world: int, kind: str, dtype: torch.dtype) -> None:
    pieces, wholes = [], []
    for index, size in enumerate(SIZES):
        extent = extents(size, world)
        whole = torch.arange(size, dtype=torch.float32) + 100 * index
        source = torch.full((extent.chunk_numel,), float("nan"))
        real = whole[rank * extent.chunk_numel :][: extent.numels[rank]]
        source[: real.numel()] = real
        region = torch.full((world, extent.chunk_numel), float("nan"), dtype=dtype)
        pieces.append(GatherPiece(source, region, extent))
        wholes.append(whole)
    route = connect(kind).gather_route(pieces, tag=7)
    for _ in range(2):
        route.start().wait()
        for piece, whole in zip(pieces, wholes, strict=True):
            assert torch.equal(piece.region.view(-1)[: whole.numel()], whole.to(dtype))
    if kind == "gloo":
        expected = sum(extents(s, world).numels[rank] for s in SIZES) * (world - 1)
        assert route.sent_bytes == expected * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gather(world2: World, world4: World, kind: str, dtype: torch.dtype) -> None:
    world2.run(gather, kind, dtype)
    world4.run(gather, kind, dtype)


def reduce(rank: int, world: int, kind: str, wire: torch.dtype) -> None:
    pieces = [extents(size, world) for size in SIZES]
    route = connect(kind).reduce_route(pieces, torch.float32, tag=7)
    sources = [(torch.arange(size, dtype=torch.float32) * (rank + 1)).to(wire) for size in SIZES]
    present = [s if i != 2 else None for i, s in enumerate(sources)]
    outs = [torch.full((p.chunk_numel,), float("nan")) for p in pieces]
    before = [s.clone() for s in sources]
    route.prepare(present)
    route.start(present, outs).wait()
    factor = world * (world + 1) / 2
    for index, (size, piece, out) in enumerate(zip(SIZES, pieces, outs, strict=True)):
        real = piece.numels[rank]
        if index == 2:
            assert bool(out.isnan().all())
            continue
        whole = torch.arange(size, dtype=torch.float32) * factor
        start = rank * piece.chunk_numel
        assert torch.equal(out[:real], whole[start : start + real])
    for source, copy in zip(sources, before, strict=True):
        assert torch.equal(source, copy), "a gradient must not change on its way"


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_reduce(world2: World, world4: World, kind: str, wire: torch.dtype) -> None:
    world2.run(reduce, kind, wire)
    world4.run(reduce, kind, wire)


def reduce_in_tree(rank: int, world: int, wire: torch.dtype) -> None:
    pieces = [extents(size, world) for size in SIZES]
    route = connect("gloo").reduce_route(pieces, torch.float32, tag=7).in_tree()
    assert route is not None
    every = [
        [torch.randn(size, generator=torch.Generator().manual_seed(r)).to(wire) for size in SIZES]
        for r in range(world)
    ]
    present = [s if i != 2 else None for i, s in enumerate(every[rank])]
    outs = [torch.full((p.chunk_numel,), float("nan")) for p in pieces]
    before = [s.clone() for s in every[rank]]
    route.start(present, outs).wait()
    for index, (piece, out) in enumerate(zip(pieces, outs, strict=True)):
        nodes = [sources[index].float() for sources in every]
        while len(nodes) > 1:
            nodes = [left + right for left, right in zip(nodes[::2], nodes[1::2], strict=True)]
        start, real = rank * piece.chunk_numel, piece.numels[rank]
        if index != 2:
            assert torch.equal(out[:real], nodes[0][start : start + real])
    for source, copy in zip(every[rank], before, strict=True):
        assert torch.equal(source, copy), "a gradient must not change on its way"


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
def test_reduce_in_tree(world2: World, world4: World, wire: torch.dtype) -> None:
    """Also bitwise, and not by chance: linear sums of these differ on four ranks."""
    world2.run(reduce_in_tree, wire)
    world4.run(reduce_in_tree, wire)


def trees(rank: int, world: int, kind: str) -> bool:
    route = connect(kind).reduce_route([extents(4, world)], torch.float32, tag=7)
    return route.in_tree() is not None


def test_who_sums_in_a_tree(world3: World, world4: World) -> None:
    assert not any(world3.run(trees, "gloo")), "three leaves are no whole tree"
    assert all(world4.run(trees, "gloo"))
    assert not any(world4.run(trees, "collective"))


def same_bits_everywhere(rank: int, world: int) -> None:
    """Every rank reduces the same replicated values: the sums must agree to the last bit."""
    group = dist.group.WORLD
    assert group is not None
    numel = 1000
    extent = Extents(numel, (numel,) * world)
    generator = torch.Generator().manual_seed(rank)
    value = torch.randn(numel, generator=generator) * 10.0**rank
    out = torch.empty(numel)
    route = GlooTransport(group).reduce_route([extent], torch.float32, tag=3)
    route.start([value.repeat(world)], [out]).wait()
    everyone = [torch.empty_like(out) for _ in range(world)]
    dist.all_gather(everyone, out)
    assert all(torch.equal(other, out) for other in everyone)


def test_sums_do_not_depend_on_the_rank(world4: World) -> None:
    world4.run(same_bits_everywhere)


def exchange(rank: int, world: int, kind: str) -> None:
    payloads = torch.full((world, 5), rank, dtype=torch.uint8)
    received = torch.empty_like(payloads)
    connect(kind).exchange(payloads, received).wait()
    assert received[:, 0].tolist() == list(range(world))


@pytest.mark.parametrize("kind", KINDS)
def test_exchange(world2: World, kind: str) -> None:
    world2.run(exchange, kind)


def overlapping(rank: int, world: int) -> None:
    """Two groups' transfers in flight at once, started in different orders on different ranks."""
    group = dist.group.WORLD
    assert group is not None
    transport = GlooTransport(group)
    regions = [torch.zeros(world, 4) for _ in range(2)]
    routes = [
        transport.gather_route(
            [GatherPiece(torch.full((4,), 10.0 * i + rank), r, Extents(4, (4,) * world))], tag=i
        )
        for i, r in enumerate(regions)
    ]
    order = routes if rank % 2 else routes[::-1]
    for pending in [route.start() for route in order]:
        pending.wait()
    for index, region in enumerate(regions):
        assert region[:, 0].tolist() == [10.0 * index + r for r in range(world)]


def test_groups_do_not_depend_on_each_others_order(world4: World) -> None:
    world4.run(overlapping)


def test_a_world_of_one_only_copies() -> None:
    transport = LocalTransport()
    source, region = torch.arange(4.0), torch.zeros(1, 4, dtype=torch.bfloat16)
    route = transport.gather_route([GatherPiece(source, region, Extents(4, (4,)))], tag=0)
    route.start().wait()
    assert region[0].tolist() == [0, 1, 2, 3]
    assert route.sent_bytes == 0
    out = torch.empty(4)
    transport.reduce_route([Extents(4, (4,))], torch.float32, 0).start([source], [out]).wait()
    assert torch.equal(out, source)


@ranks(2)
def test_a_model_dropped_while_it_gathers_disturbs_no_other(rank: int, size: int) -> None:
    """The one rank has dropped it before the other begins to gather it."""

    def sharded() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)

    def trained() -> list[torch.Tensor]:
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.linspace(-1, 1, 128).view(2, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.full_tensor() for p in model.parameters()]

    expected = trained()  # connections are there from now on
    store = dist.distributed_c10d._get_default_store()
    model = sharded()
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 64))  # plans are compared: nothing but messages travels now
    if rank == 1:
        store.wait(["dropped"])
    handle = model[1].unshard(async_op=True)
    del handle, model
    gc.collect()
    if rank == 0:
        store.set("dropped", "")
    assert all(map(torch.equal, trained(), expected))
