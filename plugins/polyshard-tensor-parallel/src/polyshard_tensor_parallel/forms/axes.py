"""Which axes of which mesh a parameter meets: data-parallel ones, and those of the plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from polyshard.errors import MeshError, UnsupportedError
from polyshard_tensor_parallel._torch_private import join_meshes


@dataclass(frozen=True)
class Axes:
    """The axes of a parameter's mesh by role. ``axis`` is a mesh axis, by its index.

    Attributes:
        data: axes that the data-parallel mesh covers too, as on a full SPMD mesh.
        model: all others: those of tensor parallelism.
    """

    data: tuple[int, ...]
    model: tuple[int, ...]


def split_axes(mesh: DeviceMesh, data_mesh: DeviceMesh | None) -> Axes:
    """Roles of the axes of ``mesh`` beside a data-parallel ``data_mesh``.

    An axis is data-parallel if its ranks are ranks of ``data_mesh``; one of a single rank, if its
    name is. Without a ``data_mesh`` (FSDP1 does not say) no axis is.
    """
    if data_mesh is None:
        return Axes((), tuple(range(mesh.ndim)))
    ranks = _ranks(data_mesh)
    names = data_mesh.mesh_dim_names or ()
    own = mesh.mesh_dim_names or (None,) * mesh.ndim
    data = []
    for axis in range(mesh.ndim):
        members = set(dist.get_process_group_ranks(mesh.get_group(axis)))
        if members <= ranks if len(members) > 1 else own[axis] in names:
            data.append(axis)
    return Axes(tuple(data), tuple(a for a in range(mesh.ndim) if a not in data))


def check_apart(data_mesh: DeviceMesh, mesh: DeviceMesh) -> None:
    """Refuse a data-parallel mesh that shares more than this rank with the tensor-parallel one.

    Raises:
        MeshError: because parameters would be sharded over ranks that hold different parts.
    """
    shared = _ranks(data_mesh) & _ranks(mesh)
    if len(shared) > 1:
        raise MeshError(
            f"the data-parallel mesh {data_mesh} shares ranks {sorted(shared)} with the "
            f"tensor-parallel mesh {mesh}. Pass fully_shard a slice of one mesh with both axes: "
            "mesh = init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp')); "
            "fully_shard(..., mesh=mesh['dp'])."
        )


def joined(data_mesh: DeviceMesh, mesh: DeviceMesh, axes: Axes) -> DeviceMesh:
    """The data-parallel axes followed by the model axes of ``mesh``.

    Raises:
        MeshError: when the two are not slices of one mesh.
    """
    if not axes.model:
        return data_mesh
    names = mesh.mesh_dim_names
    part = mesh
    if axes.data:
        assert names is not None, "a mesh of both roles has names, else no slice of it could be"
        part = mesh[tuple(names[a] for a in axes.model)]
    try:
        return join_meshes([data_mesh, part])
    except (RuntimeError, ValueError, AssertionError) as error:
        raise MeshError(
            f"the data-parallel mesh {data_mesh} and the tensor-parallel mesh {part} cannot be "
            f"joined: {error}. Slice both from one mesh: mesh = init_device_mesh(device, (dp, tp), "
            "mesh_dim_names=('dp', 'tp')); use mesh['dp'] and mesh['tp']."
        ) from error


def check_whole(fqn: str, placements: tuple[Placement, ...], axes: Axes) -> None:
    """A parameter about to be sharded is whole on data-parallel axes, and no pending sum.

    Raises:
        UnsupportedError: naming the parameter and the placement.
    """
    for axis, placement in enumerate(placements):
        if placement.is_partial() or (axis in axes.data and not isinstance(placement, Replicate)):
            role = "data-parallel" if axis in axes.data else "tensor-parallel"
            raise UnsupportedError(
                f"'{fqn}' is {placement} on {role} axis {axis} of its mesh; a parameter must be "
                "Replicate() on data-parallel axes and Shard or Replicate on the others. "
                "Redistribute it before fully_shard."
            )


def _ranks(mesh: DeviceMesh) -> set[int]:
    return {int(rank) for rank in mesh.mesh.flatten()}
