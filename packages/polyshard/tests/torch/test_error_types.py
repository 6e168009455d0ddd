"""One misuse on both engines: what polyshard raises is an instance of what torch raises."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    DataParallelMeshDims,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard
from toy_comms import CountingGather, CountingReduce
from toy_tensors import Wrapped

import polyshard
from polyshard import fully_shard
from polyshard.errors import PolyshardError
from polyshard_testing import ranks

Engine = Callable[..., Any]


def layer(**kwargs: Any) -> Any:
    return nn.Linear(4, 4, **kwargs)


def mesh(*sizes: int, names: tuple[str, ...] | None = None) -> Any:
    return init_device_mesh(torch.get_default_device().type, sizes, mesh_dim_names=names)


def hsdp() -> Any:
    return mesh(2, 2, names=("replicas", "shards"))


def two() -> Any:
    return nn.Sequential(layer(), layer())


class Half(Wrapped):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.held,), None


class Three(Half):
    def fsdp_pre_all_gather(self, a: Any, b: Any, c: Any) -> Any:  # type: ignore[override]
        return (self.held,), None

    def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def of_class(kind: type[Wrapped]) -> Any:
    module = layer(bias=False)
    module.weight = nn.Parameter(kind(module.weight.detach()))
    return module


def after_custom(engine: Engine, custom: str, comm: Any, setter: str, *given: Any) -> None:
    module = engine(layer())
    getattr(module, custom)(comm)
    getattr(module, setter)(*given)


def inner_reset(engine: Engine) -> None:
    model = two()
    engine(model[0])
    engine(model)
    model(torch.ones(1, 4))
    model[0].reset_iter_state()


def on_meta(engine: Engine) -> None:
    with torch.device("meta"):
        module = layer()
    engine(module)(torch.ones(1, 4))


def forward_method(engine: Engine) -> None:
    module = engine(layer())
    ours = isinstance(module, polyshard.FSDPModule)
    register: Any = polyshard.register_fsdp_forward_method if ours else register_fsdp_forward_method
    register(module, "absent")


def shared_context(engine: Engine) -> None:
    ours = engine is fully_shard
    share: Any = polyshard.share_comm_ctx if ours else share_comm_ctx
    share([engine(layer()), layer()])


def twice(engine: Engine) -> None:
    engine(engine(layer()))


ALLOCATE = "set_allocate_memory_from_process_group_for_comm"

MISUSES: dict[str, Callable[[Engine], Any]] = {
    "container": lambda e: e(nn.ModuleList([layer()])),
    "no module": lambda e: e(3),
    "twice": twice,
    "3-D mesh": lambda e: e(layer(), mesh=mesh(1, 2, 2)),
    "2-D mesh without names": lambda e: e(layer(), mesh=mesh(2, 2)),
    "dims of a mesh without names": lambda e: e(
        layer(), mesh=mesh(4), dp_mesh_dims=DataParallelMeshDims(shard="dp")
    ),
    "dims that are not there": lambda e: e(
        layer(), mesh=mesh(4, names=("dp",)), dp_mesh_dims=DataParallelMeshDims(shard="data")
    ),
    "resharding to a word": lambda e: e(layer(), reshard_after_forward="yes"),
    "resharding to 3 of 4": lambda e: e(layer(), reshard_after_forward=3),
    "resharding to 0": lambda e: e(layer(), reshard_after_forward=0),
    "resharding to 8 of 4": lambda e: e(layer(), reshard_after_forward=8),
    "placement of another kind": lambda e: e(layer(), shard_placement_fn=lambda p: "rows"),
    "a dim that is not there": lambda e: e(layer(), shard_placement_fn=lambda p: Shard(2)),
    "a dim that is not there, of replicas": lambda e: e(
        layer(),
        mesh=mesh(4, names=("dp",)),
        dp_mesh_dims=DataParallelMeshDims(replicate="dp"),
        shard_placement_fn=lambda p: Shard(2),
    ),
    "half a protocol": lambda e: e(of_class(Half)),
    "a protocol of three": lambda e: e(of_class(Three))(torch.ones(1, 4)),
    "deepcopy": lambda e: copy.deepcopy(e(layer())),
    "set_reshard_after_forward(2)": lambda e: e(layer()).set_reshard_after_forward(2),
    "buffers True": lambda e: e(layer()).set_reduce_scatter_max_input_buffers(True),
    "buffers 1.5": lambda e: e(layer()).set_reduce_scatter_max_input_buffers(1.5),
    "buffers '2'": lambda e: e(layer()).set_reduce_scatter_max_input_buffers("2"),
    "buffers 0": lambda e: e(layer()).set_reduce_scatter_max_input_buffers(0),
    "hook on a stream under HSDP": lambda e: e(layer(), mesh=hsdp()).set_all_reduce_hook(
        print, stream=object()
    ),
    "memory after a custom gather": lambda e: after_custom(
        e, "set_custom_all_gather", CountingGather(), ALLOCATE, True
    ),
    "memory after a custom scatter": lambda e: after_custom(
        e, "set_custom_reduce_scatter", CountingReduce(), ALLOCATE, True
    ),
    "no memory after a custom gather": lambda e: after_custom(
        e, "set_custom_all_gather", CountingGather(), ALLOCATE, False
    ),
    "symmetric memory after a custom gather": lambda e: after_custom(
        e, "set_custom_all_gather", CountingGather(), "set_symm_mem_for_comm"
    ),
    "prefetch of a plain module": lambda e: e(layer()).set_modules_to_forward_prefetch([layer()]),
    "backward prefetch of one": lambda e: e(layer()).set_modules_to_backward_prefetch([layer()]),
    "reset of an inner unit": inner_reset,
    "forward on meta": on_meta,
    "a method that is not there": forward_method,
    "a shared context of others": shared_context,
}


def raised(misuse: Callable[[Engine], Any], engine: Engine) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011  (which one is the question)
        misuse(engine)
    return caught.value


@pytest.mark.parametrize("name", MISUSES)
@ranks(4)
def test_a_misuse_raises_alike(rank: int, size: int, name: str) -> None:
    theirs = raised(MISUSES[name], torch_fully_shard)
    ours = raised(MISUSES[name], fully_shard)
    assert isinstance(ours, PolyshardError), ours
    assert isinstance(ours, type(theirs)), (type(theirs), type(ours), str(theirs))


@ranks(1)
def test_a_deprecated_setter_says_so(rank: int, size: int) -> None:
    said = []
    for engine in (torch_fully_shard, fully_shard):
        module: Any = engine(layer())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module.set_reduce_scatter_divide_factor(2.0)
        said.append([(w.category, str(w.message)) for w in caught])
    assert said[1] == said[0]
    assert said[0]
