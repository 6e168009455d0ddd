"""Seams are base classes: what an author may leave out, and what is refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_groups import GROUP, contributions

import polyshard
from polyshard import Plugin, describe, fully_shard, hookimpl
from polyshard.errors import PluginError
from polyshard.plugins import seams
from polyshard.plugins.builtin import DeviceStorage, DeviceStorageFactory
from polyshard.plugins.contributions import (
    COLLECTIVES,
    GATHER_CODEC,
    OBSERVERS,
    REDUCE_CODEC,
    STORAGE,
)
from polyshard.plugins.seams import GroupInfo, ParamInfo, overrides
from polyshard.plugins.validation import misfit
from polyshard.sharding.layout import GroupLayout
from polyshard.transport import GatherRoute, ReduceRoute, Transport
from polyshard_testing import World

BASES = [
    *("BoundGatherCodec", "BoundReduceCodec", "BoundReplicaCodec", "CollectivesBackend"),
    *("GatherCodec", "Observer", "ReduceCodec", "ShardStorage", "ShardingConstraint"),
    *("StateDictAdapter", "StorageFactory"),
]


def contributing(hook: str, part: object) -> Plugin:
    """A plugin whose only answer is ``part``."""

    def implementation(self: Any, group: GroupInfo) -> object:
        return part

    made: Any = type("Odd", (Plugin,), {"name": "odd", hook: hookimpl(implementation)})()
    plugin: Plugin = made
    return plugin


@pytest.mark.parametrize("name", BASES)
def test_bases_are_importable_from_polyshard(name: str) -> None:
    assert name in polyshard.__all__
    assert getattr(polyshard, name) is getattr(seams, name)


def test_what_is_left_out_has_a_neutral_default() -> None:
    class Minimal(polyshard.ShardStorage):
        def rest(self, shard: Tensor) -> Tensor:
            return shard

        def view(self) -> Tensor:
            return torch.empty(0)

        def fetch(self) -> None: ...

    storage, gradient = Minimal(), torch.ones(2)
    assert (storage.prefetch_units, storage.holds_gradients) == (0, False)
    assert storage.place_gradient(gradient) is gradient
    storage.prefetch()
    storage.hold([gradient])
    storage.serve_codec(enable=True)
    storage.release()

    class Doubling(polyshard.StateDictAdapter):
        name = "doubling"

        def on_save(self, param: ParamInfo, value: Any) -> Any:
            return value * 2

        def on_load(self, param: ParamInfo, value: Any) -> Any:
            return value / 2

    adapter, (param,) = Doubling(), GROUP.parameters
    assert (adapter.settings, adapter.notices) == ("", ())
    assert adapter.on_save_state(param, "exp_avg", 3.0) == 6.0
    assert adapter.on_load_state(param, "exp_avg", 3.0) == 1.5


@pytest.mark.parametrize("name", [name for name in BASES if name != "Observer"])
def test_python_says_what_a_subclass_forgot(name: str) -> None:
    forgetful: Any = type("Forgetful", (getattr(polyshard, name),), {"name": "forgetful"})
    with pytest.raises(TypeError, match="abstract"):
        forgetful()


@pytest.mark.parametrize("seam", [Transport, GatherRoute, ReduceRoute])
def test_transports_have_bases_too(seam: type) -> None:
    with pytest.raises(TypeError, match="abstract"):
        seam()
    problem = misfit(object(), seam)
    assert problem is not None
    assert problem.endswith(f"inherit from polyshard.transport.{seam.__name__}")


def test_overrides_are_told_from_defaults() -> None:
    class Placing(DeviceStorage):
        def place_gradient(self, gradient: Tensor) -> Tensor:
            return super().place_gradient(gradient)

    default = seams.ShardStorage.place_gradient
    assert not overrides(DeviceStorage().place_gradient, default)
    assert overrides(Placing().place_gradient, default)
    storage = DeviceStorage()
    storage.place_gradient = lambda gradient: gradient  # type: ignore[method-assign]
    assert overrides(storage.place_gradient, default)


def test_a_part_that_does_not_inherit_is_told_to() -> None:
    class Half:
        name, settings = "half", ""

        def bind(self, group: GroupInfo, layout: GroupLayout) -> None: ...

    for hook, base in (("observer", "Observer"), ("gather_codec", "GatherCodec")):
        with pytest.raises(PluginError, match=rf"is no {base}; inherit from polyshard\.{base}"):
            contributions(contributing(f"polyshard_{hook}", Half()))

    class Whole(polyshard.Observer):
        def on_step_end(self) -> None: ...

    whole = Whole()
    assert contributions(contributing("polyshard_observer", whole)).all(OBSERVERS) == (whole,)


def test_notices_of_every_part_are_shown(world1: World) -> None:
    world1.run(noticed)


class Telling(Plugin, polyshard.StateDictAdapter, polyshard.ShardingConstraint):
    """Parts that had no notices while those were read from some seams only."""

    name = "telling"
    notices = ("an adapter with something to say",)

    def on_save(self, param: ParamInfo, value: Any) -> Any:
        return value

    def on_load(self, param: ParamInfo, value: Any) -> Any:
        return value

    def block_elements(self, param: ParamInfo) -> int:
        return 1

    @hookimpl
    def polyshard_state_dict_adapter(self, group: GroupInfo) -> Telling:
        return self


def noticed(rank: int, size: int) -> None:
    model = fully_shard(nn.Linear(2, 2), plugins=[Telling()])
    assert "an adapter with something to say" in str(describe(model))


def test_the_engine_inherits_from_its_own_seams() -> None:
    found = contributions()
    assert isinstance(found[GATHER_CODEC], polyshard.GatherCodec)
    assert isinstance(found[REDUCE_CODEC], polyshard.ReduceCodec)
    assert isinstance(found[STORAGE], polyshard.StorageFactory)
    assert isinstance(found[COLLECTIVES], polyshard.CollectivesBackend)
    assert not inspect.isabstract(DeviceStorageFactory)
