"""The sharded form of a parameter: a ``DTensor`` over data-parallel and model axes at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from polyshard.errors import UnsupportedError
from polyshard.sharding.layout import chunk_bounds
from polyshard_tensor_parallel._torch_private import (
    is_strided,
    local_tensor,
    strided_shard,
    waited,
    wrap_local,
)
from polyshard_tensor_parallel.forms.axes import check_apart, check_whole, joined, split_axes
from polyshard_tensor_parallel.forms.strides import chunk_length, is_expressible


@dataclass(frozen=True)
class Whole:
    """A tensor before FSDP cuts it: what this rank holds of it, and how it got there.

    ``placements`` and ``mesh`` are those of the model axes alone; ``shape`` is the global one.
    """

    name: str
    local: Tensor
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size


def chunk(whole: Whole, rank: int, data_mesh: DeviceMesh, dim: int | None) -> DTensor:
    """Rank ``rank``'s chunk of ``whole`` along ``dim``, over the data axes and the model axes.

    Args:
        whole: as :func:`whole_of` gives it.
        rank: on the shard axis, the last one of ``data_mesh``.
        data_mesh: 1-D (shard) or 2-D (replicate, shard).
        dim: tensor dim that FSDP shards; ``None`` keeps the tensor whole.

    Raises:
        UnsupportedError: for uneven pieces that placements cannot describe.
    """
    data: list[Placement] = [Replicate()] * data_mesh.ndim
    local = whole.local
    if dim is not None:
        world_size = data_mesh.size(data_mesh.ndim - 1)
        data[-1] = data_placement(whole, dim, world_size)
        start, stop = chunk_bounds(local.shape[dim], world_size, rank)
        local = local.narrow(dim, start, stop - start)
    axes = split_axes(whole.mesh, data_mesh)
    model = tuple(whole.placements[a] for a in axes.model)
    full_mesh = joined(data_mesh, whole.mesh, axes)
    return wrap_local(local.detach().clone(), full_mesh, (*data, *model), whole.shape)


def whole_of(name: str, tensor: Tensor, mesh: DeviceMesh, data_mesh: DeviceMesh) -> Whole:
    """``tensor``, a ``DTensor`` on ``mesh`` or one that every rank of it holds alike.

    Raises:
        MeshError: when data and model axes share ranks.
        UnsupportedError: for placements that cannot be sharded further.
    """
    if not isinstance(tensor, DTensor):
        check_apart(data_mesh, mesh)
        placements: tuple[Placement, ...] = (Replicate(),) * mesh.ndim
        return Whole(name, tensor, mesh, placements, tensor.shape)
    placements = tuple(tensor.placements)
    axes = split_axes(mesh, data_mesh)
    check_whole(name, placements, axes)
    if not axes.data:
        check_apart(data_mesh, mesh)
    return Whole(name, waited(local_tensor(tensor)), mesh, placements, tensor.shape)


def data_placement(whole: Whole, dim: int, world_size: int) -> Placement:
    """Placement on a shard axis of ``world_size`` ranks that cuts ``dim`` of what ranks hold.

    Raises:
        UnsupportedError: for uneven pieces that placements cannot describe.
    """
    sizes = [
        whole.mesh.size(axis)
        for axis, placement in enumerate(whole.placements)
        if isinstance(placement, Shard) and placement.dim % len(whole.shape) == dim
    ]
    pieces = math.prod(sizes)
    if pieces == 1:
        return Shard(dim)
    rows = whole.shape[dim]
    even = rows % pieces == 0
    if not even and (len(sizes) > 1 or not is_expressible(rows, pieces, world_size)):
        raise UnsupportedError(
            f"'{whole.name}' {tuple(whole.shape)} is cut on dim {dim} into {pieces} uneven pieces "
            f"by tensor parallelism; over {world_size} more ranks no DTensor placements describe "
            f"the result. Shard another dim with shard_placement_fn, or make dim {dim} divisible "
            f"by {pieces}."
        )
    return strided_shard(dim, pieces)


def gather(tensor: DTensor, model_axes: int) -> Tensor:
    """The local tensor of ``tensor`` with every data axis gathered: its tensor-parallel part.

    Args:
        tensor: over data axes first, then ``model_axes`` axes of tensor parallelism.
        model_axes: how many axes of its mesh, from the end, stay as they are.
    """
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    count = mesh.ndim - model_axes
    data, model = placements[:count], placements[count:]
    if any(isinstance(p, Shard) and _shards(model, p.dim) for p in data):
        # Cut by the data axis first: rows of one piece lie on several ranks of the model axes.
        wanted = (*(Replicate() for _ in data), *model)
        return waited(local_tensor(tensor.redistribute(placements=wanted)))
    names = mesh.mesh_dim_names
    data_mesh = mesh
    if model_axes:
        assert names is not None, "meshes that were joined have names"
        data_mesh = mesh[names[:count]]
    plain = tuple(_unstrided(p) for p in data)
    shape = _model_local_shape(tensor, count)
    return waited(wrap_local(local_tensor(tensor), data_mesh, plain, shape).full_tensor())


def _shards(placements: tuple[Placement, ...], dim: int) -> bool:
    return any(isinstance(p, Shard) and p.dim == dim for p in placements)


def _unstrided(placement: Placement) -> Placement:
    return Shard(placement.dim) if is_strided(placement) else placement  # type: ignore[attr-defined]


def _model_local_shape(tensor: DTensor, first: int) -> torch.Size:
    """Shape of what a rank holds of ``tensor`` over its axes from ``first`` on."""
    shape = list(tensor.shape)
    for axis in range(first, tensor.device_mesh.ndim):
        placement = tensor.placements[axis]
        if isinstance(placement, Shard):
            world_size = tensor.device_mesh.size(axis)
            at = tensor.device_mesh.get_local_rank(axis)
            shape[placement.dim] = chunk_length(shape[placement.dim], world_size, at)
    return torch.Size(shape)
