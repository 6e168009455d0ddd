"""Plugins let go of what they made for a group: once, all of them, whatever one raises."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from toy_groups import GROUP
from toy_lifetimes import Failing, Lasting

import polyshard
from polyshard import Plugin, describe, fully_shard, hookimpl
from polyshard.errors import LifecycleError, SettingError
from polyshard.plugins.seams import GroupInfo
from polyshard.plugins.stack import build_stack
from polyshard_testing import raises_in_step, ranks


def sharded(*plugins: object) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], plugins=plugins)
    return fully_shard(model, plugins=plugins)


def test_the_last_plugin_goes_first_and_a_failure_keeps_none() -> None:
    log: list[str] = []
    teardown = build_stack([Lasting(log=log), Failing(log=log)]).teardown(GROUP)
    with pytest.raises(OSError, match="block is busy") as caught:
        teardown.run()
    assert log == ["lasting block", "failing block"]
    assert caught.value.__notes__ == [
        "raised by plugin 'failing' (0) in polyshard_teardown",
        "while letting go of group 'block'",
    ]
    teardown.run()
    assert len(log) == 2


@ranks(2)
def test_a_closed_model_lets_go_of_everything_once(rank: int, size: int) -> None:
    plugin = Lasting()
    model = sharded(plugin)
    model(torch.ones(1, 4)).sum().backward()
    weight = model[0].weight
    gradient = weight.grad
    polyshard.close(model)
    assert plugin.log == ["lasting 0", "lasting (root)"]
    assert plugin.kept == {}
    polyshard.close(model)
    assert len(plugin.log) == 2
    assert model[0].weight is weight
    assert weight.grad is gradient
    with raises_in_step(LifecycleError, r"group '.*' was closed; shard its model anew"):
        model(torch.ones(1, 4))


@ranks(1)
def test_closing_asks_all_groups_though_some_fail(rank: int, size: int) -> None:
    plugin = Failing()
    model = sharded(plugin)
    describe(model)
    with pytest.raises(OSError, match="0 is busy") as caught:
        polyshard.close(model)
    assert plugin.log == ["failing 0", "failing (root)"]
    assert any("(root) is busy" in note for note in caught.value.__notes__)


def test_what_is_not_sharded_cannot_be_closed() -> None:
    with pytest.raises(SettingError, match="call fully_shard first"):
        polyshard.close(nn.Linear(2, 2))


class Knowing(Lasting):
    """Holds the model it serves, as a plugin may."""

    model: Any = None


@ranks(1)
def test_models_that_nobody_holds_are_let_go_of(rank: int, size: int) -> None:
    plugin = Knowing()
    log, model = plugin.log, sharded(plugin)
    model(torch.ones(1, 4)).sum().backward()
    plugin.model = model
    gone = weakref.ref(model)
    del model, plugin
    gc.collect()
    assert gone() is None
    assert sorted(log) == ["lasting (root)", "lasting 0"]


class Refusing(Plugin):
    name = "refusing"

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> None:
        raise ValueError("not here")


@ranks(1)
def test_what_was_made_for_a_refused_model_is_let_go_of(rank: int, size: int) -> None:
    plugin = Lasting()
    with pytest.raises(ValueError, match="not here"):
        fully_shard(nn.Linear(4, 4), plugins=[plugin, Refusing()])
    gc.collect()
    assert plugin.log == ["lasting Linear"]


PROGRAM = """
import atexit, torch
from torch import nn
from polyshard import Plugin, fully_shard, hookimpl

class Loud(Plugin):
    name = "loud"

    @hookimpl
    def polyshard_teardown(self, group):
        print("torn down", torch.zeros(1).item())
        raise OSError("too late")

torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
model = fully_shard(nn.Linear(2, 2), plugins=[Loud()])
model(torch.ones(1, 2)).sum().backward()
torch.distributed.destroy_process_group()
"""


def test_a_process_that_ends_tears_nothing_down() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == ""
    assert "too late" not in done.stderr
