"""What the hooks make of single tensors: forms, chunks, gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel.fsdp import _chunk_tensor, _pre_load_state_dict
from toy_models import full
from toy_tensors import Coded, OldForm, Wrapped
from tp_models import meshes

from polyshard import MixedPrecisionPolicy, fully_shard
from polyshard.errors import MeshError, UnsupportedError
from polyshard.plugins.seams import ParamInfo
from polyshard.sharding.layout import chunk_bounds
from polyshard_tensor_parallel import TensorParallel
from polyshard_tensor_parallel.forms.chunks import data_placement, whole_of
from polyshard_tensor_parallel.forms.strides import chunk_length, is_expressible
from polyshard_testing import ranks


def info(tensor: DTensor, mesh: Any, dim: int | None = 0, **kwargs: Any) -> ParamInfo:
    placements = tuple(tensor.placements)
    shape = tuple(tensor.shape)
    return ParamInfo("w", shape, tensor.dtype, True, mesh, nn.Linear, placements, dim, **kwargs)


# Arithmetic -----------------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 6))
def test_strides_are_what_two_cuts_make(size: int, pieces: int, ranks: int) -> None:
    """Cut twice by hand; expressible says whether cutting once more gives the same rows."""
    rows = list(range(size))

    def part(values: list[int], count: int, index: int) -> list[int]:
        start, stop = chunk_bounds(len(values), count, index)
        return values[start:stop]

    held = [[part(part(rows, pieces, p), ranks, r) for p in range(pieces)] for r in range(ranks)]
    read = [[part(list(chain(*of_rank)), pieces, p) for p in range(pieces)] for of_rank in held]
    assert is_expressible(size, pieces, ranks) is (held == read)
    if size % pieces == 0:
        assert is_expressible(size, pieces, ranks)


# Forms ----------------------------------------------------------------------------------------


@ranks(4)
def test_unflattening_copies_nothing(rank: int, size: int) -> None:
    mesh = meshes(2, 2)
    plugin = TensorParallel(mesh=mesh["tp"])
    for placement in (Shard(0), Shard(1), Replicate()):
        weight = distribute_tensor(torch.arange(24.0).view(4, 6), mesh["tp"], [placement])
        param = info(weight, mesh["dp"])
        answer = plugin.pre_flatten_transform(weight, param)
        assert answer is not None
        local, extension = answer
        assert local is weight._local_tensor
        memory = local.to(torch.bfloat16)
        back = plugin.post_unflatten_transform(memory, extension)
        assert isinstance(back, DTensor)
        assert back._local_tensor is memory, "no copy, no view"
        assert (back.placements, back.shape, back.dtype) == ((placement,), (4, 6), torch.bfloat16)
        assert torch.equal(back.full_tensor().float(), weight.full_tensor())
        leaf: Any = nn.Parameter(back)
        assert leaf.to_local().data_ptr() == memory.data_ptr()


@ranks(4)
def test_gradients_come_back_as_their_parameters_are(rank: int, size: int) -> None:
    """Whatever placement a gradient has, what is reduced is this rank's part of its value."""
    mesh = meshes(2, 2)
    plugin = TensorParallel(mesh=mesh["tp"])
    value = torch.arange(24.0).view(4, 6)
    at = mesh["tp"].get_local_rank()
    halves = {0: value.chunk(2)[at], 1: value.chunk(2, dim=1)[at]}
    forms: list[tuple[Placement, Tensor]] = [
        (Replicate(), value),
        (Shard(0), halves[0]),
        (Shard(1), halves[1]),
        (Partial(), value * (0.25 if at else 0.75)),
        (Partial("avg"), value + (1 if at else -1)),
    ]
    for wanted, expected in ((Shard(0), halves[0]), (Shard(1), halves[1]), (Replicate(), value)):
        weight = distribute_tensor(torch.zeros(4, 6), mesh["tp"], [wanted])
        param = info(weight, mesh["dp"])
        for placement, local in forms:
            gradient = DTensor.from_local(local.clone(), mesh["tp"], [placement], run_check=False)
            answer = plugin.pre_flatten_transform(gradient, param)
            assert answer is not None
            assert type(answer[0]) is Tensor
            assert torch.equal(answer[0], expected), (wanted, placement)


@ranks(4)
def test_pending_collectives_are_waited_for(rank: int, size: int) -> None:
    mesh = meshes(2, 2)
    plugin = TensorParallel(mesh=mesh["tp"])
    local = all_reduce(torch.ones(4), "sum", mesh["tp"])
    gradient = DTensor.from_local(local, mesh["tp"], [Replicate()], run_check=False)
    assert isinstance(gradient._local_tensor, AsyncCollectiveTensor)
    answer = plugin.pre_flatten_transform(gradient, info(gradient, mesh["dp"]))
    assert answer is not None
    assert type(answer[0]) is Tensor
    assert torch.equal(answer[0], torch.full((4,), 2.0))
    late = all_reduce(torch.ones(4), "sum", mesh["tp"])
    plain = plugin.pre_flatten_transform(late, replace(info(gradient, mesh["dp"]), placements=None))
    assert plain is not None
    assert type(plain[0]) is Tensor


@ranks(4)
def test_partial_gradients_are_summed_in_the_reduce_dtype(rank: int, size: int) -> None:
    """1 + 2**-8 is no bf16 value: added there it is 1, in the reduce dtype it is itself."""
    mesh = meshes(2, 2)
    plugin = TensorParallel(mesh=mesh["tp"])
    at = mesh["tp"].get_local_rank()
    part = torch.full((4,), 2.0**-8 if at else 1.0, dtype=torch.bfloat16)
    weight = distribute_tensor(torch.zeros(4, dtype=torch.bfloat16), mesh["tp"], [Replicate()])
    expected = {torch.float32: 1.0 + 2.0**-8, None: 1.0, torch.bfloat16: 1.0}
    for reduce_dtype, value in expected.items():
        gradient = DTensor.from_local(part.clone(), mesh["tp"], [Partial()], run_check=False)
        param = info(weight, mesh["dp"], reduce_dtype=reduce_dtype)
        answer = plugin.pre_flatten_transform(gradient, param)
        assert answer is not None
        assert torch.equal(answer[0].float(), torch.full((4,), value)), reduce_dtype


class Scaled(nn.Module):
    """``x * weight`` on this rank's part of a batch: the gradient of ``weight`` is partial."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * self.weight
        return out


@ranks(4)
def test_the_policy_reaches_the_sum(rank: int, size: int) -> None:
    mesh = meshes(2, 2)
    weight = distribute_tensor(torch.zeros(4), mesh["tp"], [Replicate()])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = Scaled(weight)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy, plugins=[TensorParallel()])
    at = mesh["tp"].get_local_rank()
    rows = torch.full((1, 4), 2.0**-7 if at else 1.0 + 2.0**-7, dtype=torch.bfloat16)
    x = DTensor.from_local(rows, mesh["tp"], [Shard(0)], run_check=False)
    model.set_requires_gradient_sync(False)  # kept in the reduce dtype, so nothing is rounded
    model(x).sum().backward()
    model.set_requires_gradient_sync(True)
    model(x).sum().backward()
    assert torch.equal(full(model.weight.grad), torch.full((4,), 2.0 + 2.0**-5))


# Chunks ---------------------------------------------------------------------------------------

SHAPES = ((8, 6), (4, 6), (6, 10), (2, 3), (10, 7), (7, 4), (9, 5))


@pytest.mark.parametrize("replicas", [0, 2], ids=["fsdp", "hsdp"])
@ranks(4)
def test_placements_describe_reality(rank: int, size: int, replicas: int) -> None:
    mesh = meshes(1 if replicas else 2, 2, replicas)
    data: Any = mesh["replicas", "dp"] if replicas else mesh["dp"]
    plugin = TensorParallel(mesh=mesh["tp"])
    shards, at = data.size(data.ndim - 1), mesh["dp"].get_local_rank()
    for shape in SHAPES:
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        for placement in (Shard(0), Shard(1), Replicate()):
            tensor = distribute_tensor(whole, mesh["tp"], [placement])
            for dim in (0, 1, None):
                same = isinstance(placement, Shard) and placement.dim == dim
                if same and dim is not None and not is_expressible(shape[dim], 2, shards):
                    continue
                made = plugin.chunk_dtensor(tensor, at, data, info(tensor, data, dim))
                assert made is not None
                case = (shape, placement, dim)
                assert made.device_mesh == mesh, case
                assert made.placements[-1] == placement, case
                assert torch.equal(made.full_tensor(), whole), case
                assert torch.equal(plugin.all_gather_dtensor(made), tensor.to_local()), case
                again = made.redistribute(placements=[Replicate()] * mesh.ndim)
                assert torch.equal(again.to_local(), whole), case
        param = replace(info(tensor, data), placements=None)
        plain = plugin.chunk_dtensor(whole, at, data, param)
        assert plain is not None
        assert plain.placements[-2:] == (Shard(0), Replicate())
        assert torch.equal(plain.full_tensor(), whole)
        assert torch.equal(plugin.all_gather_dtensor(plain), whole)


@ranks(4)
def test_what_cannot_be_described_is_refused(rank: int, size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (4, 1), mesh_dim_names=("dp", "tp"))
    both = meshes(2, 2)
    uneven = distribute_tensor(torch.zeros(9, 2), both["tp"], [Shard(0)])
    plugin = TensorParallel(mesh=both["tp"])
    assert plugin.chunk_dtensor(uneven, 0, both["dp"], info(uneven, both["dp"])) is not None
    whole = whole_of("w", uneven, both["tp"], both["dp"])
    assert data_placement(whole, 1, 4) == Shard(1)
    with pytest.raises(UnsupportedError, match=r"'w' \(9, 2\) .* 2 uneven pieces .*another dim"):
        data_placement(whole, 0, 4)
    with pytest.raises(MeshError, match=r"shares ranks \[\d, \d\] with the tensor-parallel mesh"):
        fully_shard(nn.Linear(4, 4), plugins=[plugin])  # over all ranks
    with pytest.raises(UnsupportedError, match=r"'w' is S\(0\) on data-parallel axis 0"):
        plugin.chunk_dtensor(uneven, 0, mesh["dp"], info(uneven, mesh["dp"]))
    partial = DTensor.from_local(torch.zeros(4), both["tp"], [Partial()], run_check=False)
    with pytest.raises(UnsupportedError, match=r"'w' is P\(sum\) on tensor-parallel axis 0"):
        plugin.chunk_dtensor(partial, 0, both["dp"], info(partial, both["dp"]))


def made_of(local: Tensor, mesh: Any) -> ShardedTensor:
    """A sharded tensor over the model axis, as models before DTensor had."""
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard

    group = mesh["tp"].get_group()
    offsets = [dist.get_rank(group) * local.shape[0], 0]
    shard = LocalShard.from_tensor_and_offsets(local, offsets, dist.get_rank())
    whole = (2 * local.shape[0], local.shape[1])
    made: ShardedTensor = init_from_local_shards([shard], *whole, process_group=group)
    return made


def _boxes(tensor: ShardedTensor) -> list[tuple[list[int], list[int]]]:
    return [(m.shard_offsets, m.shard_sizes) for m in tensor.metadata().shards_metadata]


def _box(whole: Tensor, offsets: list[int], sizes: list[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole


@ranks(4)
def test_sharded_tensors_are_nested(rank: int, size: int) -> None:
    """Nested sharded tensors, box by box as torch's extension makes them."""
    mesh = meshes(2, 2)
    plugin = TensorParallel(mesh=mesh["tp"])
    group = mesh["dp"].get_group()
    at = mesh["dp"].get_local_rank()
    assert plugin.chunk_tensor(torch.ones(4), at, 2, 1, group) is None
    for placement in (Shard(0), Shard(1), Replicate()):
        tensor = distribute_tensor(torch.arange(24.0).view(4, 6), mesh["tp"], [placement])
        made = plugin.chunk_tensor(tensor, at, 2, 1, group)
        assert isinstance(made, ShardedTensor)
        if rank < 2:  # torch's own takes ranks of the group for global ones, and raises elsewhere
            expected: Any = _chunk_tensor(tensor, at, 2, 1, group)
            assert _boxes(made) == _boxes(expected)
            assert made.metadata().size == expected.metadata().size
        answer = plugin.pre_load_state_dict_transform(made)
        assert answer is not None
        inner, shards = answer
        theirs, their_shards = _pre_load_state_dict(made)
        assert inner is theirs
        assert len(shards) == len(their_shards) == 1
        assert torch.equal(shards[0].tensor, tensor.to_local().chunk(2)[at])
        own = made.local_shards()[0].metadata
        covered = _box(torch.arange(24.0).view(4, 6), own.shard_offsets, own.shard_sizes)
        assert torch.equal(covered, tensor.to_local())
        assert sum(rows * columns for _, (rows, columns) in _boxes(made)) == 24
        halves = made_of(tensor.to_local(), mesh)
        again = plugin.chunk_tensor(halves, at, 2, 1, group)
        assert isinstance(again, ShardedTensor)
        assert isinstance(again.local_shards()[0].tensor, ShardedTensor)
        assert plugin.pre_load_state_dict_transform(inner) is None


def test_chunk_lengths() -> None:
    assert [chunk_length(7, 3, r) for r in range(3)] == [3, 3, 1]


@pytest.mark.parametrize("kind", [OldForm, Coded])
@ranks(4)
def test_local_tensors_that_gather_for_themselves(
    rank: int, size: int, kind: type[Wrapped]
) -> None:
    """FSDP2's tensor-subclass protocol on the local tensor of a ``DTensor`` parameter."""
    mesh = meshes(2, 2)
    runs = []
    engines: Any = (torch_fully_shard, partial(fully_shard, plugins=[TensorParallel()]))
    for engine in engines:
        torch.manual_seed(0)
        model: Any = nn.Linear(6, 8, bias=False)
        whole = distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)])
        local = kind(whole.to_local().clone())
        parts = DTensor.from_local(local, mesh["tp"], [Shard(0)], run_check=False)
        model.weight = nn.Parameter(parts)
        engine(model, mesh=mesh["dp"])
        losses = []
        for step in range(2):
            x = torch.full((2, 6), 1.0 + rank // 2 + step)
            out = model(DTensor.from_local(x, mesh["tp"], [Replicate()], run_check=False))
            assert isinstance(out, DTensor)
            loss: Any = out.square().sum()
            loss.backward()
            losses += [loss.full_tensor().item(), full(model.weight.grad).sum().item()]
        runs.append(losses)
    assert runs[1] == runs[0]
