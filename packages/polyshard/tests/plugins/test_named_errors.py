"""An exception in a part of a plugin says whose it is, which part, and for which group."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from toy_codecs import BytesGather, Codecs, GatherFactory, ReduceFactory
from toy_storage import Away, AwayFactory, SlowBackend

from polyshard import Plugin, describe, fully_shard, hookimpl
from polyshard.errors import PeerError, PlanMismatchError, PluginError
from polyshard.plugins.builtin import DefaultBackend
from polyshard.plugins.seams import GroupInfo, ShardingConstraint
from polyshard_testing import ranks


class BrokenGather(GatherFactory):
    def bind(self, group: Any, layout: Any) -> Any:
        raise KeyError("bits")


class BrokenReduce(ReduceFactory):
    def bind(self, group: Any, layout: Any) -> Any:
        raise KeyError("bits")


class BrokenCreate(AwayFactory):
    def bind(self, group: Any, layout: Any) -> Any:
        raise KeyError("bits")


class Restless(Away):
    def rest(self, shard: Tensor) -> Tensor:
        raise KeyError("bits")


class BrokenRest(AwayFactory):
    def bind(self, group: Any, layout: Any) -> Away:
        return Restless()


class BrokenConnect(SlowBackend):
    def bind(self, group: Any, roles: Any) -> Any:
        raise KeyError("bits")


class BrokenBlocks(ShardingConstraint):
    name = "blocks"

    def block_elements(self, param: Any) -> int:
        raise KeyError("bits")


BROKEN = [
    ("gather_codec", BrokenGather, "BrokenGather.bind, its gather codec", "(root)"),
    ("reduce_codec", BrokenReduce, "BrokenReduce.bind, its reduce codec", "(root)"),
    ("shard_storage", BrokenCreate, "BrokenCreate.bind, its shard storage", "Linear"),
    ("shard_storage", BrokenRest, "Restless.rest, its shard storage", "Linear"),
    ("collectives_backend", BrokenConnect, "BrokenConnect.bind, its collectives", "Linear"),
    (
        "sharding_constraint",
        BrokenBlocks,
        "BrokenBlocks.block_elements, its sharding constraint",
        "Linear",
    ),
]


def giving(hook: str, part: object) -> Plugin:
    def implementation(self: Any, group: GroupInfo) -> object:
        return part

    members = {"name": "odd", "version": "1.2", f"polyshard_{hook}": hookimpl(implementation)}
    made: Any = type("Odd", (Plugin,), members)()
    plugin: Plugin = made
    return plugin


@pytest.mark.parametrize(("hook", "part", "where", "group"), BROKEN)
@ranks(2)
def test_exceptions_are_named(
    rank: int, size: int, hook: str, part: Any, where: str, group: str
) -> None:
    with pytest.raises(KeyError) as caught:
        describe(fully_shard(nn.Linear(4, 4), plugins=[giving(hook, part())]))
    expected = f"raised by plugin 'odd' (1.2) in {where} for group '{group}'"
    assert caught.value.__notes__ == [expected]


@pytest.mark.parametrize(("hook", "part", "where", "group"), BROKEN)
@ranks(2)
def test_other_ranks_are_told_the_same(
    rank: int, size: int, hook: str, part: Any, where: str, group: str
) -> None:
    def run() -> None:
        model = fully_shard(nn.Linear(4, 4), plugins=[giving(hook, part())] if rank else [])
        model(torch.ones(1, 4))

    if rank:
        with pytest.raises(KeyError):
            run()
        return
    with pytest.raises(PlanMismatchError) as caught:
        run()
    assert f"raised by plugin 'odd' (1.2) in {where} for group '{group}'" in str(caught.value)


class Wide(ShardingConstraint):
    name = "wide"

    def block_elements(self, param: Any) -> int:
        return 24


@ranks(2)
def test_a_constraint_that_is_broken_names_its_plugin(rank: int, size: int) -> None:
    expected = (
        r"plugin 'odd' \(1\.2\): constraint 'wide' needs blocks of 24 elements of "
        r"'weight' \(4, 4\) of group 'Linear' on one rank"
    )
    with pytest.raises(PluginError, match=expected):
        fully_shard(nn.Linear(4, 4), plugins=[giving("sharding_constraint", Wide())])


class Empty(DefaultBackend):
    name = "empty"

    def bind(self, group: Any, roles: Any) -> Any:
        return None


@ranks(1)
def test_what_does_not_fit_is_named_alike(rank: int, size: int) -> None:
    expected = r"plugin 'odd' \(1\.2\): Empty\.bind for group 'Linear' returned None"
    with pytest.raises(PluginError, match=expected):
        fully_shard(nn.Linear(4, 4), plugins=[giving("collectives_backend", Empty())])


@ranks(2)
def test_an_operation_of_a_step_names_itself_its_plugin_and_the_group(rank: int, size: int) -> None:
    """Also to the other rank, which quotes it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for unit in (*model, model):
        fully_shard(unit, plugins=[Codecs()])
    model(torch.ones(1, 4))
    said = "in operation 'decode' of plugin 'codecs' (1.2), polyshard.wait of group '0'"
    broken = mock.patch.object(BytesGather, "decode", side_effect=KeyError("bits"))
    with broken if rank else nullcontext(), pytest.raises((KeyError, PeerError)) as refused:
        model(torch.ones(1, 4)).sum().backward()  # at whose end the host waits for a device
    found = str(refused.value) if rank == 0 else refused.value.__notes__
    assert said in found, found
