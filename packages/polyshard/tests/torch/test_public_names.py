"""The public names against the installed torch's: changing the import keeps everything."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import polyshard
from polyshard import FSDPModule, fully_shard
from polyshard_testing import ranks

OURS_MORE = {"fully_shard": {"plugins"}}
"""Parameters that polyshard adds to a function of torch's."""

NEWER = {"dp_mesh_dims"}
"""Parameters that torch 2.11 does not have yet."""

FUNCTIONS = ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]
CLASSES = [
    "CPUOffloadPolicy",
    *(["DataParallelMeshDims"] if hasattr(torch_fsdp, "DataParallelMeshDims") else []),
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    *(["GradientReductionHandle"] if hasattr(torch_fsdp, "GradientReductionHandle") else []),
    "UnshardHandle",
]
FSDP1 = {
    "BackwardPrefetch CPUOffload FullOptimStateDictConfig FullStateDictConfig "
    "FullyShardedDataParallel LocalOptimStateDictConfig LocalStateDictConfig MixedPrecision "
    "OptimStateDictConfig OptimStateKeyType ShardedOptimStateDictConfig ShardedStateDictConfig "
    "ShardingStrategy StateDictConfig StateDictSettings StateDictType"
}


def shape_of(function: Callable[..., Any], known: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults of the parameters that ``known`` has; types may be wider."""
    names = inspect.signature(known).parameters
    more = {*OURS_MORE.get(known.__name__, ()), *NEWER}
    return [
        (p.name, p.kind, p.default)
        for p in inspect.signature(function).parameters.values()
        if p.name in names or p.name not in more
    ]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_what_torch_takes(name: str) -> None:
    ours, theirs = getattr(polyshard, name), getattr(torch_fsdp, name)
    assert shape_of(ours, theirs) == shape_of(theirs, theirs)


METHODS = [
    name
    for name, member in vars(torch_fsdp.FSDPModule).items()
    if inspect.isfunction(member) and name != "__new__"
]


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_what_torch_takes(name: str) -> None:
    owner = next(c for c in FSDPModule.__mro__ if name in vars(c))
    assert owner is not torch_fsdp.FSDPModule, f"{name} would run torch's code on ours"
    ours, theirs = getattr(FSDPModule, name), getattr(torch_fsdp.FSDPModule, name)
    taken, given = (inspect.signature(each).parameters for each in (ours, theirs))
    if "args" in given and "args" not in taken:  # passed on, to nn.Module's own
        theirs = getattr(nn.Module, name)
    assert shape_of(ours, theirs) == shape_of(theirs, theirs)


@pytest.mark.parametrize("name", CLASSES)
def test_classes_are_torchs_own_or_derived(name: str) -> None:
    assert issubclass(getattr(polyshard, name), getattr(torch_fsdp, name))


NEWEST = [
    "set_keep_unsharded_storage",
    "set_manual_backward_finalization",
    "finalize_backward",
]
"""Methods of torch 2.15, which every supported torch has here."""


@pytest.mark.parametrize("name", NEWEST)
def test_newer_methods_are_there_with_every_torch(name: str) -> None:
    assert callable(getattr(FSDPModule, name))


def test_every_public_name_of_fsdp2_is_here() -> None:
    fsdp1 = set(" ".join(FSDP1).split())
    assert set(torch_fsdp.__all__) - fsdp1 == {*FUNCTIONS, *CLASSES} <= set(polyshard.__all__)


@ranks(1)
def test_sharded_modules_are_recognised(rank: int, size: int) -> None:
    model: Any = fully_shard(nn.Sequential(nn.Linear(4, 4)))
    assert isinstance(model, torch_fsdp.FSDPModule)
    assert isinstance(model, FSDPModule)
    assert isinstance(model, nn.Sequential)
    assert type(model).__name__ == "FSDPSequential"
    assert type(model[:1]) is nn.Sequential, "a slice is a plain container"
