"""Storages that ask learn of gathers early; what changed meanwhile is fetched again."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from toy_models import chain, run_chain
from toy_storage import EagerPlugin

from polyshard import fully_shard
from polyshard_testing import ranks


@ranks(2)
def test_storages_that_ask_hear_early(rank: int, size: int) -> None:
    plugin = EagerPlugin(1)
    model = chain(plugin, 4)
    run_chain(model)
    assert not [line for line in plugin.log if line.startswith("prefetch")]
    plugin.log.clear()
    run_chain(model)
    fetches = [line for line in plugin.log if line.startswith("fetch")]
    forward = ["fetch 1 (near)", "fetch 2 (near)", "fetch 3 (near)", "fetch 4 (near)"]
    assert fetches[:4] == forward  # the root, which starts first, announces the first layer
    assert fetches[4:] == ["fetch 4", "fetch 3", "fetch 2 (near)", "fetch 1 (near)"]
    assert plugin.log.index("fetch 1 (near)") < plugin.log.index("prefetch 3")


@ranks(1)
def test_others_are_left_alone(rank: int, size: int) -> None:
    plugin = EagerPlugin(0)
    model = chain(plugin, 4)
    for _ in range(3):
        run_chain(model)
    assert not [line for line in plugin.log if line.startswith("prefetch")]


@ranks(2)
def test_what_changed_is_fetched_again(rank: int, size: int) -> None:
    """A write between prefetch and gather is seen, wherever it comes."""
    plugin = EagerPlugin(2)
    model, plain = chain(plugin, 4), chain(EagerPlugin(0), 4)
    for each in (model, plain):
        run_chain(each)

    def write(module: nn.Module, args: object, output: object) -> None:
        owner = model if module is model[0] else plain
        with torch.no_grad():
            owner[2].weight.mul_(2.0)  # type: ignore[operator]

    for each in (model, plain):
        each[0].register_forward_hook(write)
    plugin.log.clear()
    assert run_chain(model) == run_chain(plain)
    assert plugin.log[plugin.log.index("release 3") + 1] == "fetch 3"  # not the stale one
    for each in (model, plain):
        with torch.no_grad():
            each(torch.ones(2, 4))  # an evaluation, which may announce what never comes
            each[0].weight.mul_(3.0)  # type: ignore[operator]
    assert run_chain(model) == run_chain(plain)


@ranks(1)
def test_a_world_of_one_leaves_the_resting_shard_alone(rank: int, size: int) -> None:
    """At world size 1 too: the resting shard may be far away, the view is what was fetched."""
    plugin = EagerPlugin(0)
    model = nn.Linear(4, 4)
    fully_shard(model, plugins=[plugin])
    model.unshard()  # type: ignore[operator]
    resting = model.weight.data_ptr()
    model.reshard()  # type: ignore[operator]
    assert resting != cast(DTensor, model.weight).to_local().data_ptr()
