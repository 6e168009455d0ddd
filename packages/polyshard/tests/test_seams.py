"""Plugins in a real training: each seam is asked at plan time and used in every step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from toy_adapters import Adapting
from toy_codecs import Codecs, OtherCodec
from toy_models import assert_same_parameters, build, loss_of, shard, tokens_for, train
from toy_observers import Watching
from toy_planning import Constrained, Preparing
from toy_storage import Resting
from toy_transforms import Flattening, Transposing, Unsqueezing

from polyshard import MixedPrecisionPolicy, Plugin, describe, fully_shard, hookimpl, stats
from polyshard.errors import ConflictError, PlanMismatchError, PluginError
from polyshard.plugins.seams import ParamInfo
from polyshard.plugins.stack import PluginStack
from polyshard_testing import World, ranks


def batches(rank: int) -> list[torch.Tensor]:
    return [tokens_for(step, rank) for step in range(3)]


def make(kind: str) -> list[object]:
    made: dict[str, list[object]] = {
        "codecs": [Codecs()],
        "storage": [Resting()],
        "transforms": [Transposing(before=["flattening"]), Flattening()],
        "reverse": [Flattening(), Transposing(after=["flattening"])],
        "all": [Watching(), Resting(), Codecs(), Flattening(), Transposing(), Preparing()],
    }
    return made[kind]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["codecs", "storage", "transforms", "reverse", "all"])
@ranks(2)
def test_exact_plugins_change_nothing(rank: int, size: int, kind: str) -> None:
    """Nothing these plugins do is lossy, so training must not change by a bit at two ranks."""
    plain, plugged = shard(build(), fully_shard), build()
    shard(plugged, fully_shard, plugins=make(kind))
    assert train(plugged, batches(rank)).losses == train(plain, batches(rank)).losses
    for unit in (plain, plugged):
        unit.reshard()  # type: ignore[operator]
    predicted = describe(plugged)
    before = stats(plugged).bytes_sent
    loss_of(plugged, tokens_for(0, rank)).backward()
    assert stats(plugged).bytes_sent - before == predicted.step_bytes


def test_codecs_serve_uneven_worlds(world3: World) -> None:
    world3.run(close_to_plain, "codecs")


def close_to_plain(rank: int, size: int, kind: str) -> None:
    plain, plugged = shard(build(), fully_shard), build()
    shard(plugged, fully_shard, plugins=make(kind))
    found, expected = (train(m, batches(rank)).losses for m in (plugged, plain))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@ranks(2)
def test_transforms_nest(rank: int, size: int) -> None:
    """Transposed first, then flat: the shard is the flat transpose; names and values survive."""
    transposing = Transposing(before=["flattening"])
    model: Any = torch.nn.Linear(6, 4)
    whole = model.weight.detach().clone()
    fully_shard(model, plugins=[Flattening(), transposing])
    assert transposing.seen == [("weight", (4, 6))]
    assert isinstance(model.weight, DTensor)
    weight: Any = model.weight
    assert torch.equal(weight.detach().full_tensor(), whole.t().reshape(-1))
    model.unshard()
    assert torch.equal(model.weight.detach(), whole)
    model.reshard()
    x = torch.full((1, 6), float(rank + 1))
    model(x).sum().backward()
    mean = sum(range(1, size + 1)) / size
    assert torch.equal(weight.grad.full_tensor(), torch.full((24,), mean))


@pytest.mark.parametrize("first", [True, False], ids=["transposed first", "unsqueezed first"])
@ranks(2)
def test_two_transforms_compose_in_both_orders(rank: int, size: int, first: bool) -> None:
    """Both plugins change every matrix; which comes first shows in what is sharded."""
    relation: dict[str, list[str]] = {"before" if first else "after": ["unsqueezing"]}
    plugins = [Unsqueezing(), Transposing(**relation)]
    plain, plugged = shard(build(), fully_shard), build()
    shard(plugged, fully_shard, plugins=plugins)
    block: Any = plugged.blocks[0]
    assert tuple(block.up.weight.shape) == ((192, 250, 1) if first else (1, 192, 250))
    assert train(plugged, batches(rank)).losses == train(plain, batches(rank)).losses


@ranks(2)
def test_observers_see_the_life_cycle(rank: int, size: int) -> None:
    plugin = Watching()
    model = torch.nn.Sequential(torch.nn.Linear(512, 512, bias=False))
    fully_shard(model[0], plugins=[plugin])
    fully_shard(model, plugins=[plugin])
    model(torch.ones(1, 512)).sum().backward()
    half = 512 * 512 * 4 // 2
    assert plugin.watcher.events == [
        f"unshard 0 {half}",
        "unsharded 0",
        "reshard 0",
        f"unshard 0 {half}",
        "unsharded 0",
        "reshard 0",
        f"reduce 0 {half}",
        "reduced 0",
        "step end",
    ]


@ranks(1)
def test_models_are_prepared(rank: int, size: int) -> None:
    model = build()
    shard(model, fully_shard, plugins=[Preparing()])
    assert model.prepared
    assert all(block.prepared for block in model.blocks)


@ranks(2)
def test_state_dicts_are_adapted(rank: int, size: int) -> None:
    source = shard(build(), fully_shard, plugins=[Adapting()])
    native = shard(build(), fully_shard)
    saved, plain = source.state_dict(), native.state_dict()
    for name, value in plain.items():
        assert torch.equal(saved[name].full_tensor(), -value.full_tensor())
    target = shard(build(7), fully_shard, plugins=[Adapting()])
    target.load_state_dict(saved)
    assert_same_parameters(target, native, exact=True)


@ranks(2)
def test_constraints_are_checked(rank: int, size: int) -> None:
    fully_shard(torch.nn.Linear(8, 4), plugins=[Constrained(1)])
    pattern = r"'blocks' needs blocks of 3 elements of 'weight' \(4, 8\).*every 16 elements"
    with pytest.raises(PluginError, match=pattern):
        fully_shard(torch.nn.Linear(8, 4), plugins=[Constrained(3)])


@ranks(2)
def test_two_claims_of_one_role_are_refused(rank: int, size: int) -> None:
    pattern = (
        r"plugins 'codecs' \(1\.2\) and 'other' \(3\) both claim the gather codec of group "
        r"'Linear' \(weight, bias\)\. Pass only one"
    )
    for plugins in ([Codecs(), OtherCodec()], [OtherCodec(), Codecs()]):
        with pytest.raises(ConflictError, match=pattern):
            fully_shard(torch.nn.Linear(2, 2), plugins=plugins)
    fully_shard(torch.nn.Linear(2, 2), plugins=[Codecs(), OtherCodec(only="Conv")])


@ranks(2)
def test_different_plugins_are_refused_on_all_ranks(rank: int, size: int) -> None:
    plugins: Sequence[object] = [Watching(), Codecs()] if rank else [Codecs(), Watching()]
    same = shard(build(), fully_shard, plugins=plugins)
    loss_of(same, tokens_for(0, rank))  # the order of passing does not matter
    model = shard(build(), fully_shard, plugins=[Codecs()] if rank else [])
    with pytest.raises(PlanMismatchError) as caught:
        model(tokens_for(0, rank))
    assert re.search(r"\+group \(root\): plugin codecs 1\.2", str(caught.value))


@ranks(2)
def test_a_step_calls_no_hook(rank: int, size: int) -> None:
    """A step asks no plugin: the stack is not called."""
    model = shard(build(), fully_shard, plugins=[Codecs(), Watching(), Flattening()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, tokens_for(0, rank)).backward()
    calls: list[str] = []
    ask = PluginStack.ask

    def count_ask(self: Any, *args: Any, **given: Any) -> Any:
        calls.append("stack")
        return ask(self, *args, **given)

    stack: Any = PluginStack
    stack.ask = count_ask
    try:
        loss_of(model, tokens_for(1, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert calls == []
        fully_shard(torch.nn.Linear(2, 2), plugins=[Codecs()])
        assert calls  # the counter does count
    finally:
        stack.ask = ask


@ranks(1)
def test_an_exception_names_its_plugin(rank: int, size: int) -> None:
    class Broken(OtherCodec):
        pass

    plugin = Broken()
    plugin.only = 3  # type: ignore[assignment]
    with pytest.raises(TypeError) as caught:
        fully_shard(torch.nn.Linear(2, 2), plugins=[plugin])
    assert "raised by plugin 'other' (3) in polyshard_gather_codec" in caught.value.__notes__


class Spread(Plugin):
    """Takes parameters off a second axis, and says that their sharded form has both."""

    name = "spread"

    def __init__(self, mesh: DeviceMesh, cut: int = 0) -> None:
        self.mesh = mesh
        self.cut = cut

    @hookimpl
    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, str] | None:
        return (tensor.to_local(), "local") if isinstance(tensor, DTensor) else None

    @hookimpl
    def post_unflatten_transform(self, tensor: Tensor) -> Tensor:
        return tensor

    @hookimpl
    def chunk_dtensor(
        self, tensor: DTensor, rank: int, device_mesh: DeviceMesh, param: ParamInfo
    ) -> DTensor:
        assert param.placements == (Replicate(),)
        assert param.shard_dim == 0
        assert param.reduce_dtype == torch.float64
        local = tensor.to_local().chunk(device_mesh.size())[rank][self.cut :]
        return DTensor.from_local(local, self.mesh, [Shard(0), Replicate()])


class Mute(Spread):
    """Flattens, and has nothing to say of the sharded form."""

    chunk_dtensor = None  # type: ignore[assignment]


class SpreadAll(Spread):
    """Puts parameters that are no ``DTensor`` on the larger mesh as well."""

    @hookimpl
    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, str]:
        return tensor, "all"

    @hookimpl
    def chunk_dtensor(
        self, tensor: Tensor, rank: int, device_mesh: DeviceMesh, param: ParamInfo
    ) -> DTensor:
        assert param.placements is None
        local = tensor.chunk(device_mesh.size())[rank]
        return DTensor.from_local(local, self.mesh, [Shard(0), Replicate()])


@ranks(4)
def test_a_plain_parameter_may_live_on_a_larger_mesh(rank: int, size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = torch.nn.Linear(4, 4)
    whole = model.weight.detach().clone()
    fully_shard(model, mesh=mesh["dp"], plugins=[SpreadAll(mesh)])
    assert model.weight.placements == model.bias.placements == (Shard(0), Replicate())
    assert torch.equal(model.weight.full_tensor(), whole)
    model(torch.ones(1, 4)).sum().backward()
    assert torch.equal(model.bias.grad.full_tensor(), torch.ones(4))


@ranks(4)
def test_a_transformed_parameter_may_live_on_a_larger_mesh(rank: int, size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(16.0).view(4, 4)

    def build_on_axis() -> Any:
        module = torch.nn.Linear(4, 4)
        value = DTensor.from_local(whole.clone(), mesh["tp"], [Replicate()])
        module.weight = torch.nn.Parameter(value)
        return module

    model = build_on_axis()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy, plugins=[Spread(mesh)])
    assert model.weight.device_mesh == mesh
    assert model.weight.placements == (Shard(0), Replicate())
    assert torch.equal(model.weight.full_tensor(), whole)
    model(torch.ones(1, 4)).sum().backward()
    assert model.weight.grad.placements == (Shard(0), Replicate())
    assert torch.equal(model.weight.grad.full_tensor(), torch.ones(4, 4))
    assert model.bias.device_mesh.ndim == 1, "no DTensor, so not asked for"
    cut = [Spread(mesh, cut=1)]
    with pytest.raises(PluginError, match=r"'weight' a local shape of \(1, 4\), but .*\(2, 4\)"):
        fully_shard(build_on_axis(), mesh=mesh["dp"], mp_policy=policy, plugins=cut)
    with pytest.raises(PluginError, match=r"chunk_dtensor returned a NoneType.*other axes"):
        fully_shard(build_on_axis(), mesh=mesh["dp"], plugins=[Mute(mesh)])
