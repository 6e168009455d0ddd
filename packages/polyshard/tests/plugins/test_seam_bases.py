"""Seams are base classes: what an author may leave out, and parts that do not inherit."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_groups import GROUP, contributions

import polyshard
from polyshard import Plugin, describe, fully_shard, hookimpl, seams
from polyshard.errors import PluginError
from polyshard.plugins.builtin import DeviceStorage, DeviceStorageFactory
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


# Parts that do not inherit ------------------------------------------------------------------------


class OldStorage:
    """As written for the first release: no base, and only what was asked for then."""

    def rest(self, shard: Tensor) -> Tensor:
        self.shard = shard
        return shard

    def view(self) -> Tensor:
        return self.shard

    def prefetch(self) -> None: ...

    def fetch(self) -> None: ...

    def release(self) -> None: ...

    def place_gradient(self, gradient: Tensor) -> Tensor:
        self.placed = gradient.clone()
        return gradient


class OldFactory:
    name, settings = "old", "of the first release"

    def __init__(self) -> None:
        self.made: list[OldStorage] = []

    def bind(self, group: GroupInfo, layout: GroupLayout) -> OldStorage:
        self.made.append(OldStorage())
        return self.made[-1]


class OldGather:
    def __init__(self, layout: GroupLayout) -> None:
        self.placed = layout.parameters
        self.payload_bytes = 4 * layout.shard_numel

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        payload.copy_(shard.view(torch.uint8))

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        values = payloads.view(torch.float32)
        for placed, region in zip(self.placed, regions, strict=True):
            start = placed.shard_offset
            region.copy_(values[:, start : start + placed.chunk_numel])


class OldCodec:
    name, settings = "old", ""

    def bind(self, group: GroupInfo, layout: GroupLayout) -> OldGather:
        return OldGather(layout)


class OldObserver:
    """All six methods, and nothing to say in ``describe()``."""

    def __init__(self) -> None:
        self.steps = 0

    def on_unshard(self, group: str, payload_bytes: int) -> None: ...

    def on_unsharded(self, group: str, wait_seconds: float) -> None: ...

    def on_reshard(self, group: str) -> None: ...

    def on_reduce(self, group: str, payload_bytes: int) -> None: ...

    def on_reduced(self, group: str, wait_seconds: float) -> None: ...

    def on_step_end(self) -> None:
        self.steps += 1


class OldParts(Plugin):
    name = "old_parts"

    def __init__(self) -> None:
        self.factory, self.observer = OldFactory(), OldObserver()

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> OldFactory:
        return self.factory

    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> OldCodec:
        return OldCodec()

    @hookimpl
    def polyshard_observer(self, group: GroupInfo) -> OldObserver:
        return self.observer


def trained(plugins: Sequence[object]) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(3, 5), plugins=plugins)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.arange(6.0).view(2, 3)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, model


def old_parts(rank: int, size: int) -> None:
    plugin = OldParts()
    losses, model = trained([plugin])
    assert losses == trained([])[0]
    assert plugin.observer.steps == 3
    (storage,) = plugin.factory.made
    for placed in describe(model).groups[0].layout.parameters:
        end = placed.shard_offset + placed.chunk_numel
        padding = storage.placed[placed.shard_offset + placed.local_numel(rank) : end]
        assert padding.numel() > 0 or rank == 0
        assert not bool(padding.any()), "whoever overrides place_gradient sees zeros there"
    assert "shard storage old(of the first release)" in str(describe(model))


def test_parts_without_a_base_serve_as_before(world2: World) -> None:
    world2.run(old_parts)


def test_a_part_without_a_base_keeps_what_it_has() -> None:
    class Wordy(OldFactory):
        notices = ("said",)

    factory = Wordy()
    found = contributions(contributing("polyshard_shard_storage", factory))
    same: object = found.storage
    assert same is factory
    assert found.notices == ("said",)

    class Computed(OldFactory):
        """Properties may be of no use before the part was bound: nobody reads them early."""

        @property
        def notices(self) -> tuple[str, ...]:
            raise RuntimeError("not bound yet")

    assert misfit(Computed(), seams.StorageFactory) is None

    class Around:
        """Everything it has not is another storage's."""

        def __init__(self, inner: object) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    inner = DeviceStorage()
    inner.prefetch_units = 7
    around: Any = Around(inner)
    assert misfit(around, seams.ShardStorage) is None
    assert around.prefetch_units == 7


def test_a_part_that_cannot_be_given_defaults_is_refused() -> None:
    module: Any = ModuleType("parts")
    module.name, module.settings, module.create = "parts", "", OldFactory().create
    with pytest.raises(
        PluginError, match=r"lacks notices of StorageFactory; inherit from polyshard\.StorageFac"
    ):
        contributions(contributing("polyshard_shard_storage", module))
    module.notices = ()
    assert contributions(contributing("polyshard_shard_storage", module)).storage is module


def test_half_an_observer_is_told_to_inherit() -> None:
    class Half:
        def on_step_end(self) -> None: ...

    with pytest.raises(
        PluginError, match=r"lacks on_unshard, .*; inherit from polyshard\.Observer"
    ):
        contributions(contributing("polyshard_observer", Half()))

    class Whole(polyshard.Observer):
        def on_step_end(self) -> None: ...

    whole = Whole()
    assert contributions(contributing("polyshard_observer", whole)).observers == (whole,)


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
    assert isinstance(found.gather_codec, polyshard.GatherCodec)
    assert isinstance(found.reduce_codec, polyshard.ReduceCodec)
    assert isinstance(found.storage, polyshard.StorageFactory)
    assert isinstance(found.backend, polyshard.CollectivesBackend)
    assert not inspect.isabstract(DeviceStorageFactory)
