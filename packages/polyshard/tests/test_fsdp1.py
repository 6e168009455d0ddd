"""Bridges to FSDP1: its extension objects here, our stacks there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.fsdp._fsdp_extensions import FSDPExtensions
from torch.distributed.tensor import DTensor, Replicate, Shard
from toy_models import assert_same_parameters, build, shard, tokens_for, train
from toy_transforms import Flattening, Transposing

from polyshard import Contract, Plugin, fully_shard, hookimpl
from polyshard.errors import ConflictError
from polyshard.fsdp1 import as_fsdp_extensions, from_fsdp_extensions, set_extensions, wrapping_with
from polyshard_testing import ranks


class Transposed(FSDPExtensions):
    """Shards matrices transposed and counts what it is asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.compute_stream: Any = None

    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Any]:
        self.calls.append("pre_flatten_transform")
        return (tensor.t(), "t") if tensor.ndim == 2 else (tensor, None)

    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        self.calls.append("post_unflatten_transform")
        assert param_extension == "t"
        return tensor.t()

    def chunk_tensor(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.append("chunk_tensor")
        return torch.tensor(1)

    def chunk_dtensor(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.append("chunk_dtensor")
        return torch.tensor(2)

    def pre_load_state_dict_transform(self, tensor: Tensor) -> tuple[Tensor, list[Any]]:
        self.calls.append("pre_load_state_dict_transform")
        return tensor, []

    def all_gather_dtensor(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.append("all_gather_dtensor")
        return torch.tensor(3)


@ranks(2)
def test_an_extension_object_of_torch_is_a_plugin(rank: int, size: int) -> None:
    extensions = Transposed()
    plugins = [from_fsdp_extensions(extensions)]
    batches = [tokens_for(s, rank) for s in range(3)]
    ours, plain = shard(build(), fully_shard, plugins=plugins), shard(build(), fully_shard)
    weight = ours.blocks[0].up.weight  # type: ignore[union-attr]
    assert isinstance(weight, DTensor)
    assert tuple(weight.shape) == (192, 250), "sharded transposed"
    assert train(ours, batches) == train(plain, batches)
    assert {"pre_flatten_transform", "post_unflatten_transform"} <= set(extensions.calls)


@ranks(2)
def test_exclusive_hooks(rank: int, size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    extensions = Transposed()
    hooks: Any = as_fsdp_extensions([from_fsdp_extensions(extensions)])
    tensor = torch.arange(5.0)
    assert hooks.chunk_dtensor(tensor, rank, mesh) == 2
    assert hooks.chunk_tensor(tensor, rank, size, size, dist.group.WORLD) == 1
    assert hooks.all_gather_dtensor(tensor, mesh) == 3
    assert hooks.pre_load_state_dict_transform(tensor) == (tensor, [])
    named = from_fsdp_extensions(Transposed(), Contract("second"))
    both: Any = as_fsdp_extensions([from_fsdp_extensions(extensions), named])
    with pytest.raises(ConflictError, match=r"'Transposed' .* and 'second' .* both answer chunk_d"):
        both.chunk_dtensor(tensor, rank, mesh)


class OnlyBias(Plugin):
    """Claims some parameters and leaves the others to the engine."""

    name = "only_bias"

    @hookimpl
    def chunk_dtensor(self, tensor: Tensor, device_mesh: Any) -> DTensor | None:
        if tensor.ndim != 1:
            return None
        return DTensor.from_local(tensor, device_mesh, [Replicate()])


@ranks(2)
def test_the_engine_answers_what_nobody_claims(rank: int, size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    hooks: Any = as_fsdp_extensions([OnlyBias()])
    bias, weight = torch.arange(5.0), torch.arange(15.0).view(5, 3)
    assert hooks.chunk_dtensor(bias, rank, mesh).placements == (Replicate(),)
    sharded = hooks.chunk_dtensor(weight, rank, mesh)
    assert sharded.placements == (Shard(0),)
    assert torch.equal(sharded.to_local(), weight.chunk(size)[rank])
    assert torch.equal(hooks.all_gather_dtensor(sharded, None), weight)
    assert hooks.chunk_dtensor(torch.tensor(1.0), rank, mesh).placements == (Replicate(),)
    group = dist.group.WORLD
    assert group is not None
    chunked = hooks.chunk_tensor(weight, rank, size, size, group)
    loaded, shards = hooks.pre_load_state_dict_transform(chunked)
    assert loaded is chunked
    assert torch.equal(shards[0].tensor, weight.chunk(size)[rank])
    with pytest.raises(ValueError, match=r"holds a Tensor where a ShardedTensor was expected"):
        hooks.pre_load_state_dict_transform(weight)


def train_fsdp1(model: nn.Module, batches: list[Tensor], extensions: Any, original: bool) -> Any:
    kwargs: dict[str, Any] = {
        "use_orig_params": original,
        "sharding_strategy": ShardingStrategy.FULL_SHARD,
        "device_id": torch.get_default_device(),
    }
    if extensions is None:
        wrapped = FullyShardedDataParallel(model, **kwargs)
    else:
        with wrapping_with(extensions):
            wrapped = FullyShardedDataParallel(model, **kwargs)
    return wrapped, train(wrapped, batches)


@pytest.mark.parametrize("original", [True, False], ids=["original params", "flat params"])
@ranks(2)
def test_fsdp1_trains_with_a_stack_of_ours(rank: int, size: int, original: bool) -> None:
    batches = [tokens_for(s, rank) for s in range(3)]
    transposing = Transposing(before=["flattening"])
    extensions = as_fsdp_extensions([Flattening(), transposing])
    _, expected = train_fsdp1(build(), batches, None, original)
    wrapped, found = train_fsdp1(build(), batches, extensions, original)
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=1e-6)
    assert transposing.seen, "FSDP1 asked our stack"
    with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT):
        state = wrapped.state_dict()
        assert {k: v.shape for k, v in state.items()} == {
            k: v.shape for k, v in build().state_dict().items()
        }
        wrapped.load_state_dict(state)
    with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT):
        wrapped.load_state_dict(wrapped.state_dict())
    set_extensions(wrapped, extensions)  # also after wrapping, for the state-dict hooks


@ranks(2)
def test_the_bridge_leaves_torch_alone(rank: int, size: int) -> None:
    """Leaving the block leaves torch as it was."""
    with wrapping_with(as_fsdp_extensions([])):
        pass
    wrapped = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.get_default_device())
    assert wrapped._fsdp_extension is None
    assert_same_parameters(wrapped, wrapped, exact=True)
