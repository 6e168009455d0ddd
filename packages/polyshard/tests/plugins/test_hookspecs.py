"""One test for each hook: who is asked, and what becomes of the answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from toy_adapters import Adapting, Negating
from toy_codecs import Codecs, GatherFactory, ReduceFactory
from toy_groups import GROUP, NO_MESH, PARAM, contributions
from toy_landing import InTurn, Landing
from toy_lifetimes import Kept, Lasting
from toy_observers import Watching
from toy_planning import Blocks, Constrained, Preparing, Signing
from toy_storage import AwayFactory, Resting, SlowBackend
from toy_transforms import Flattening, Transposing

from polyshard import Plugin, hookimpl
from polyshard.errors import ConflictError, PluginError
from polyshard.fsdp1 import as_fsdp_extensions
from polyshard.plugins import hookspecs
from polyshard.plugins.builtin import (
    DefaultBackend,
    DeviceStorageFactory,
    NativeCodec,
    ShardLanding,
)
from polyshard.plugins.contributions import (
    ADAPTERS,
    COLLECTIVES,
    CONSTRAINTS,
    GATHER_CODEC,
    LANDING,
    OBSERVERS,
    REDUCE_CODEC,
    STORAGE,
)
from polyshard.plugins.seams import ParamInfo
from polyshard.plugins.stack import build_stack
from polyshard.plugins.validation import hook_arguments
from polyshard_testing import World


def test_every_hook_has_its_test() -> None:
    tests = {name.removeprefix("test_hook_") for name in globals() if name.startswith("test_hook_")}
    assert tests == set(hook_arguments())


def test_hook_polyshard_prepare_model() -> None:
    class Replacing(Plugin):
        name = "replacing"

        @hookimpl
        def polyshard_prepare_model(self, module: nn.Module) -> nn.Module:
            return nn.Sequential(module)

    class Chained(Plugin):
        name = "chained"

        @hookimpl
        def polyshard_prepare_model(self, module: nn.Module) -> nn.Module:
            return module

    module = nn.Linear(1, 1)
    build_stack([Preparing(), Chained()]).prepare(module, NO_MESH)
    assert module.prepared
    with pytest.raises(PluginError, match=r"'replacing' \(0\) returned a Sequential.*in place"):
        build_stack([Replacing()]).prepare(module, NO_MESH)


def test_hook_pre_flatten_transform() -> None:
    transforms = build_stack([Flattening(), Transposing(before=["flattening"])]).transforms
    flat, extensions = transforms.flatten(torch.arange(6.0).view(2, 3), PARAM)
    assert flat.tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    assert extensions == ("transposed", (3, 2))


def test_hook_post_unflatten_transform() -> None:
    transforms = build_stack([Flattening(), Transposing(before=["flattening"])]).transforms
    value = torch.arange(6.0).view(2, 3)
    flat, extensions = transforms.flatten(value, PARAM)
    back = transforms.unflatten(flat, extensions, PARAM)
    assert torch.equal(back, value)
    assert back.data_ptr() == flat.data_ptr()


def test_hook_polyshard_parameter_facts() -> None:
    class Wrong(Plugin):
        name = "wrong"

        @hookimpl
        def polyshard_parameter_facts(self) -> str:
            return "two\nlines"

    class Other(Plugin):
        name = "other"

        @hookimpl
        def polyshard_parameter_facts(self) -> str:
            return "fact"

    tensor = torch.ones(2, 3)
    assert build_stack([]).facts(tensor, PARAM) == ()
    assert build_stack([Signing(), Other()]).facts(tensor, PARAM) == ("fact", "sum 6.0")
    assert build_stack([Signing()]).facts(tensor, replace(PARAM, requires_grad=False)) == ()
    with pytest.raises(PluginError, match=r"'wrong'.*for 'w'; return one line of text"):
        build_stack([Wrong()]).facts(tensor, PARAM)


def test_hook_polyshard_sharding_constraint() -> None:
    assert contributions().all(CONSTRAINTS) == ()
    assert contributions(Constrained(4)).all(CONSTRAINTS) == (Blocks(4),)


def test_hook_polyshard_shard_storage() -> None:
    assert isinstance(contributions()[STORAGE], DeviceStorageFactory)
    assert isinstance(contributions(Resting())[STORAGE], AwayFactory)


def test_hook_polyshard_collectives_backend() -> None:
    assert type(contributions()[COLLECTIVES]) is DefaultBackend
    assert type(contributions(Resting())[COLLECTIVES]) is SlowBackend


def test_hook_polyshard_gather_codec() -> None:
    assert isinstance(contributions()[GATHER_CODEC], NativeCodec)
    assert isinstance(contributions(Codecs())[GATHER_CODEC], GatherFactory)


def test_hook_polyshard_reduce_codec() -> None:
    assert isinstance(contributions()[REDUCE_CODEC], NativeCodec)
    assert isinstance(contributions(Codecs())[REDUCE_CODEC], ReduceFactory)


def test_hook_polyshard_gradient_landing() -> None:
    assert isinstance(contributions()[LANDING], ShardLanding)
    assert contributions()[LANDING].owners(GROUP) == [None]
    assert isinstance(contributions(Landing())[LANDING], InTurn)


def test_hook_polyshard_observer() -> None:
    class Later(Watching):
        name = "later"
        after = ("watching",)

    class Earlier(Watching):
        name = "zz"
        before = ("watching",)

    first, last, plain = Earlier(), Later(), Watching()
    watchers = contributions(last, plain, first).all(OBSERVERS)
    assert watchers == (first.watcher, plain.watcher, last.watcher)


def test_hook_polyshard_state_dict_adapter() -> None:
    assert contributions().all(ADAPTERS) == ()
    (adapter,) = contributions(Adapting()).all(ADAPTERS)
    assert isinstance(adapter, Negating)


class Claiming(Plugin):
    """Answers the exclusive hooks of the parameter called ``only``."""

    def __init__(self, name: str, only: str) -> None:
        self.name = name  # type: ignore[misc]
        self.only = only

    def _mine(self, param: ParamInfo | None) -> Any:
        return self.name if param is not None and param.fqn == self.only else None

    @hookimpl
    def chunk_tensor(self, param: ParamInfo | None) -> Any:
        return self._mine(param)

    @hookimpl
    def chunk_dtensor(self, param: ParamInfo | None) -> Any:
        return self._mine(param)

    @hookimpl
    def all_gather_dtensor(self, param: ParamInfo | None) -> Any:
        return self._mine(param)

    @hookimpl
    def pre_load_state_dict_transform(self, param: ParamInfo | None) -> Any:
        return self._mine(param)


def ask(hook: str, fqn: str, *claims: tuple[str, str]) -> Any:
    param = ParamInfo(fqn, (2, 3), torch.float32, True, NO_MESH, nn.Linear)
    stack = build_stack([Claiming(name, only) for name, only in claims])
    missing: dict[str, Any] = dict.fromkeys(hook_arguments()[hook])
    spec: Any = getattr(hookspecs, hook)
    return stack.claimed(spec, **{**missing, "param": param})


def check_exclusive(hook: str) -> None:
    assert ask(hook, "w", ("one", "w"), ("two", "b")) == "one"
    assert ask(hook, "b", ("one", "w"), ("two", "b")) == "two"
    with pytest.raises(
        ConflictError, match=rf"'one' \(0\) and 'two' \(0\) both answer {hook}.*'w'"
    ):
        ask(hook, "w", ("two", "w"), ("one", "w"))


def default_chunk_dtensor(rank: int, size: int) -> None:
    hooks: Any = as_fsdp_extensions([])  # as FSDP1 asks: without param
    line, square = (
        init_device_mesh(torch.get_default_device().type, (size,)),
        init_device_mesh(torch.get_default_device().type, (1, size)),
    )
    value = torch.arange(6.0).view(3, 2)
    assert hooks.chunk_dtensor(value, rank, line).placements == (Shard(0),)
    assert hooks.chunk_dtensor(value, rank, square).placements == (Replicate(), Shard(0))
    sharded = hooks.chunk_dtensor(value, rank, line)
    assert torch.equal(sharded.to_local(), value.chunk(size)[rank])
    scalar = hooks.chunk_dtensor(torch.tensor(1.0), rank, square)
    assert scalar.placements == (Replicate(), Replicate())


def test_hook_chunk_dtensor(world2: World) -> None:
    check_exclusive("chunk_dtensor")
    world2.run(default_chunk_dtensor)


def default_all_gather_dtensor(rank: int, size: int) -> None:
    hooks: Any = as_fsdp_extensions([])  # as FSDP1 asks: without param
    value = torch.arange(6.0).view(3, 2)
    mesh: DeviceMesh = init_device_mesh(torch.get_default_device().type, (size,))
    whole = hooks.all_gather_dtensor(hooks.chunk_dtensor(value, rank, mesh), None)
    assert not isinstance(whole, DTensor)
    assert torch.equal(whole, value)


def test_hook_all_gather_dtensor(world2: World) -> None:
    check_exclusive("all_gather_dtensor")
    world2.run(default_all_gather_dtensor)


def sharded_tensor(rank: int, size: int, value: Tensor) -> Any:
    group: Any = dist.group.WORLD
    hooks: Any = as_fsdp_extensions([])
    return hooks.chunk_tensor(value, rank, size, size, group)


def default_chunk_tensor(rank: int, size: int) -> None:
    value = torch.arange(6.0).view(3, 2)
    (shard,) = sharded_tensor(rank, size, value).local_shards()
    assert torch.equal(shard.tensor, value.chunk(size)[rank])


def test_hook_chunk_tensor(world2: World) -> None:
    check_exclusive("chunk_tensor")
    world2.run(default_chunk_tensor)


def default_pre_load(rank: int, size: int) -> None:
    hooks: Any = as_fsdp_extensions([])  # as FSDP1 asks: without param
    sharded = sharded_tensor(rank, size, torch.arange(6.0).view(3, 2))
    tensor, shards = hooks.pre_load_state_dict_transform(sharded)
    assert torch.equal(shards[0].tensor, sharded.local_shards()[0].tensor)
    assert tensor is sharded
    with pytest.raises(PluginError, match="holds a Tensor where a ShardedTensor was expected"):
        hooks.pre_load_state_dict_transform(torch.ones(1))


def test_hook_pre_load_state_dict_transform(world2: World) -> None:
    check_exclusive("pre_load_state_dict_transform")
    world2.run(default_pre_load)


def test_hooks_of_torch_keep_their_arguments() -> None:
    """The six mirror ``FSDPExtensions``: same names, same arguments, and ``param``."""
    import inspect

    from torch.distributed.fsdp._fsdp_extensions import FSDPExtensions

    ours = hook_arguments()
    for name in FSDPExtensions.__abstractmethods__:
        theirs = tuple(inspect.signature(getattr(FSDPExtensions, name)).parameters)[1:]
        assert ours[name][: len(theirs)] == theirs
        assert ours[name][len(theirs) :] == ("param",)


def test_hook_polyshard_plugin_state() -> None:
    plugin = Lasting()
    ((name, state),) = contributions(plugin).states
    assert name == "lasting"
    assert isinstance(state, Kept)
    assert contributions(Lasting("elsewhere")).states == ()


def test_hook_polyshard_teardown() -> None:
    plugin = Lasting()
    build_stack([plugin]).teardown(GROUP).run()
    assert plugin.log == ["lasting block"]
