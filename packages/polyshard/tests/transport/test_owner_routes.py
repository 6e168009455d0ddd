"""Whole tensors to one rank and back, on every kind of transport."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from polyshard.errors import UnsupportedError
from polyshard.transport.base import OwnerRoute, Pending, Transport
from polyshard.transport.collective import CollectiveTransport
from polyshard.transport.gloo import GlooTransport
from polyshard.transport.local import LocalTransport
from polyshard.transport.wrapped import WrappedTransport
from polyshard_testing import ranks


class Counting(WrappedTransport):
    sent = 0

    def started(self, pending: Pending, sent_bytes: int) -> Pending:
        self.sent += sent_bytes
        return pending


def connect(kind: str) -> Transport:
    group = dist.group.WORLD
    assert group is not None
    if kind == "collective":
        return CollectiveTransport(group, torch.get_default_device())
    return GlooTransport(group)


def check(route: OwnerRoute, rank: int, size: int, wire: torch.dtype) -> None:
    numels = [3, 2, 0, 1][:size]
    for owner in range(size):
        values = [torch.arange(40, dtype=torch.float32).to(wire) * (r + 1) for r in range(size)]
        outs = [torch.empty(40) if rank == owner else None for _ in range(2)]
        pending = [route.reduce(key, owner, values[rank], out) for key, out in enumerate(outs)]
        for one in reversed(pending):
            one.wait()
        total = sum(v.float() for v in values)
        assert all(out is None or torch.equal(out, total) for out in outs)  # type: ignore[arg-type]
        parts = [torch.full((n,), float(r)) for r, n in enumerate(numels)]
        out = torch.empty(numels[rank])
        given = parts if rank == owner else None
        route.scatter(5, owner, given, out, 3).wait()
        assert torch.equal(out, parts[rank])
        back = [torch.empty(n) for n in numels] if rank == owner else None
        route.gather(6, owner, out, back, 3).wait()
        assert back is None or all(map(torch.equal, back, parts))
        value = torch.full((4,), float(rank))
        route.broadcast(7, owner, value).wait()
        assert value.eq(owner).all()


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["gloo", "collective"])
@ranks(2, 4)
def test_whole_tensors(rank: int, size: int, kind: str, wire: torch.dtype) -> None:
    check(connect(kind).owner_route(torch.float32, 9), rank, size, wire)


@ranks(4)
def test_wrapped_ones_are_seen(rank: int, size: int) -> None:
    transport = Counting(connect("gloo"))
    check(transport.owner_route(torch.float32, 9), rank, size, torch.float32)
    whole, rows, numels = 2 * 40 * 4 * 3, 6 * 4, [3, 2, 0, 1]
    mine = numels[rank] * 4
    assert transport.sent == whole + (rows - mine) + 3 * mine + 4 * 4


@ranks(1)
def test_alone(rank: int, size: int) -> None:
    check(LocalTransport().owner_route(torch.float32, 9), rank, size, torch.float32)
    check(connect("gloo").owner_route(torch.float32, 9), rank, size, torch.float32)


def test_transports_without_a_way_say_so() -> None:
    with pytest.raises(UnsupportedError, match="transport 'local' has no owner_route"):
        Transport.owner_route(LocalTransport(), torch.float32, 0)
