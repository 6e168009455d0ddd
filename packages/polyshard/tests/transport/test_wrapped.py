"""A transport around another one is the other one, but for what it changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyshard import CollectivesBackend, Plugin, fully_shard, hookimpl, stats
from polyshard.plugins.seams import GroupInfo, overrides
from polyshard.transport import (
    Extents,
    MeshRoles,
    Pending,
    ReduceRoute,
    Transport,
    WrappedTransport,
    choose_transport,
)
from polyshard.transport.base import DONE
from polyshard.transport.local import LocalTransport
from polyshard_testing import World


class Counting(WrappedTransport):
    """Adds up what leaves this rank."""

    def __init__(self, inner: Transport, sent: list[int]) -> None:
        super().__init__(inner)
        self.name, self.sent = "counting", sent

    def started(self, pending: Pending, sent_bytes: int) -> Pending:
        self.sent.append(sent_bytes)
        return pending


class Count(Plugin, CollectivesBackend):
    name = "count"

    def __init__(self) -> None:
        self.sent: list[int] = []

    @hookimpl
    def polyshard_collectives_backend(self) -> CollectivesBackend:
        return self

    def bind(self, group: GroupInfo, roles: MeshRoles) -> Transport:
        return Counting(choose_transport(roles, group.device), self.sent)


class NoAnswer(ReduceRoute):
    """A route that leaves :meth:`answer` to the base."""

    def start(self, sources: Sequence[Tensor | None], outs: Sequence[Tensor]) -> Pending:
        return DONE

    def sent_bytes(self, sources: Sequence[Tensor | None]) -> int:
        return 5


class NoAnswerTransport(WrappedTransport):
    """One whose reductions are not to be ended early."""

    def __init__(self) -> None:
        super().__init__(LocalTransport())

    def reduce_route(self, extents: Sequence[Extents], dtype: torch.dtype, tag: int) -> ReduceRoute:
        return NoAnswer()


def test_settings_are_those_of_the_inner_transport() -> None:
    inner = LocalTransport()
    inner.can_coalesce = True
    outer = WrappedTransport(inner)
    assert (outer.name, outer.rank, outer.size) == ("local", 0, 1)
    outer.staging_bytes, outer.staging_reason, outer.coalesces = 7, "measured", True
    assert (inner.staging_bytes, inner.staging_reason, inner.coalesces) == (7, "measured", True)
    inner.staging_bytes = 9
    assert (outer.staging_bytes, outer.staging_reason, outer.coalesces) == (9, "measured", True)
    assert outer.can_coalesce
    outer.can_coalesce = False
    assert not inner.can_coalesce


@pytest.mark.parametrize(("made", "answers"), [(LocalTransport, True), (NoAnswerTransport, False)])
def test_a_route_answers_where_the_inner_one_does(
    made: Callable[[], Transport], answers: bool
) -> None:
    route = WrappedTransport(made()).reduce_route((), torch.float32, 0)
    assert overrides(route.answer, ReduceRoute.answer) is answers


def test_every_transfer_passes_once() -> None:
    sent: list[int] = []
    outer = Counting(NoAnswerTransport(), sent)
    outer.gather_route((), 0).start().wait()
    outer.reduce_route((), torch.float32, 0).start((), ()).wait()
    outer.exchange(torch.ones(1, 4), torch.ones(1, 4)).wait()
    assert sent == [0, 5, 0]


def test_a_block_is_wrapped_alike() -> None:
    outer = Counting(LocalTransport(), [])
    block = outer.block(1)
    assert type(block) is Counting
    assert (block.name, block.sent) == ("counting", outer.sent)
    assert block is not outer


def losses_with(rank: int, size: int, count: bool) -> tuple[list[float], int, int]:
    """Losses, what the wrapper saw, and what the engine counted."""
    torch.manual_seed(0)
    plugin = Count()
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 5))
    for layer in (model[0], model):
        fully_shard(layer, plugins=[plugin] if count else [])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(3):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, sum(plugin.sent), stats(model).bytes_sent


def test_training_is_bitwise_the_same(world2: World) -> None:
    (found, seen, sent), (expected, _, _) = (
        world2.run(losses_with, count)[0] for count in (True, False)
    )
    assert found == expected
    assert seen == sent > 0
