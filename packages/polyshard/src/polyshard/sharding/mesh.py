"""Roles of the axes of a device mesh. `axis` is a mesh axis, `dim` a tensor dim."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polyshard._torch.newer import forget_destroyed_groups
from polyshard._torch.private import join_meshes
from polyshard.errors import MeshError, UnnamedMeshError
from polyshard.policies import DataParallelMeshDims


@dataclass(frozen=True, eq=False)
class MeshRoles:
    """A data-parallel mesh with a role for each axis.

    Parameters are sharded over ``shard_axis`` (``None``: every rank holds them whole), and shards
    replicated over ``replicate_axes``.
    """

    mesh: DeviceMesh
    shard_axis: int | None
    replicate_axes: tuple[int, ...] = ()

    @cached_property
    def shard_group(self) -> dist.ProcessGroup:
        """Process group of the shard axis, which must exist."""
        assert self.shard_axis is not None
        return self.mesh.get_group(self.shard_axis)

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """Mesh of the shard axis alone, which must exist."""
        assert self.shard_axis is not None
        names = self.mesh.mesh_dim_names
        return (
            self.mesh if names is None or self.mesh.ndim == 1 else self.mesh[names[self.shard_axis]]
        )

    @cached_property
    def shard_ranks(self) -> tuple[int, ...]:
        """Global ranks of the shard axis, in its order; empty without a shard axis."""
        return (
            () if self.shard_axis is None else tuple(dist.get_process_group_ranks(self.shard_group))
        )

    @cached_property
    def shard_rank(self) -> int:
        """This rank's position on the shard axis."""
        return 0 if self.shard_axis is None else self.mesh.get_local_rank(self.shard_axis)

    @cached_property
    def shard_size(self) -> int:
        """Number of ranks on the shard axis; 1 without one."""
        return 1 if self.shard_axis is None else self.mesh.size(self.shard_axis)

    @cached_property
    def replicate_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Process groups of the replicate axes that have more than one rank."""
        return tuple(self.mesh.get_group(a) for a in self.replicate_axes if self.mesh.size(a) > 1)

    @cached_property
    def replicate_size(self) -> int:
        """Number of ranks over all replicate axes; 1 without any."""
        return math.prod(self.mesh.size(a) for a in self.replicate_axes)

    @cached_property
    def is_replicated(self) -> bool:
        """Whether the mesh has a replicate axis, even of size 1."""
        return bool(self.replicate_axes)

    def whole(self) -> MeshRoles:
        """Return the roles for parameters that every rank holds whole."""
        return MeshRoles(self.mesh, None, tuple(range(self.mesh.ndim)))

    @cached_property
    def _layout(self) -> Tensor:
        """Global ranks in the shape of the mesh, cached: the mesh computes them at every access."""
        return self.mesh.mesh

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Equal for equal roles on equal meshes."""
        return (
            self.mesh.device_type,
            self.mesh.mesh_dim_names,
            tuple(self._layout.shape),
            tuple(self._layout.flatten().tolist()),
            self.shard_axis,
            self.replicate_axes,
        )

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the whole mesh, in ascending order."""
        return tuple(sorted(self._layout.flatten().tolist()))

    @cached_property
    def shard_members(self) -> tuple[int, ...]:
        """Global ranks of the shard axis, in its order; this rank alone without one."""
        if self.shard_axis is None:
            return (dist.get_rank(),)
        return tuple(dist.get_process_group_ranks(self.shard_group))

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Global ranks of the mesh, a tuple for each replica."""
        if self.shard_axis is None:
            return tuple((rank,) for rank in self.ranks)
        rows = self._layout.movedim(self.shard_axis, -1).reshape(-1, self.shard_size)
        return tuple(tuple(row) for row in rows.tolist())

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks whose gradients are averaged."""
        return self.shard_size * self.replicate_size

    @cached_property
    def device(self) -> torch.device:
        """Compute device of this rank; ``meta`` on a mesh that only a plan uses."""
        kind = self.mesh.device_type
        if kind in {"cpu", "meta"}:
            return torch.device(kind)
        return torch.device(kind, torch.get_device_module(kind).current_device())

    def describe(self) -> str:
        """Axes with names and sizes, as they appear in a plan."""
        names = self.mesh.mesh_dim_names or tuple(str(i) for i in range(self.mesh.ndim))
        roles = ["shard" if a == self.shard_axis else "replicate" for a in range(self.mesh.ndim)]
        axes = (f"{names[a]}={self.mesh.size(a)} ({roles[a]})" for a in range(self.mesh.ndim))
        return f"{self.mesh.device_type} " + " x ".join(axes)


def resolve_mesh(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None = None) -> MeshRoles:
    """Give every data-parallel axis of ``mesh`` a role; without a mesh, shard over all ranks.

    Args:
        mesh: 1-D (shard), 2-D (replicate, shard), or with ``dims`` any mesh with named axes.
        dims: which axes are data-parallel; several of one role are flattened into one.

    Raises:
        MeshError: for a mesh of the wrong rank, one this process is not part of, or one whose
            process groups are gone.
    """
    if mesh is None and dims is None:
        return MeshRoles(default_mesh(), shard_axis=0)  # just made, of all ranks
    mesh = default_mesh() if mesh is None else mesh
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}: {mesh!r}")
    if dims is not None:
        return _resolve_named(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise MeshError(
            f"fully_shard expects a 1D mesh (shard) or a 2D mesh (replicate, shard), got {mesh}. "
            "Pass a slice of it, such as mesh['dp'], or say with dp_mesh_dims which axes are "
            "data-parallel."
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise UnnamedMeshError(
            f"a 2D mesh needs names for its axes, got {mesh}. Pass mesh_dim_names=('replicate', "
            "'shard') to init_device_mesh."
        )
    _check_membership(mesh)
    if mesh.ndim == 1:
        return MeshRoles(mesh, shard_axis=0)
    return MeshRoles(mesh, shard_axis=1, replicate_axes=(0,))


def _resolve_named(mesh: DeviceMesh, dims: DataParallelMeshDims) -> MeshRoles:
    present = mesh.mesh_dim_names or ()
    missing = [n for n in (*dims.replicate_names, *dims.shard_names) if n not in present]
    if missing:
        raise MeshError(
            f"dp_mesh_dims names {missing}, which are not axes of {mesh} (axes: {list(present)}). "
            "Name axes of the mesh passed to fully_shard; init_device_mesh takes mesh_dim_names."
        )
    shared = set(dims.replicate_names) & set(dims.shard_names)
    if shared:
        raise MeshError(
            f"dp_mesh_dims gives {sorted(shared)} both roles; an axis shards or replicates."
        )
    _check_membership(mesh)
    parts = [_flattened(mesh, names) for names in (dims.replicate_names, dims.shard_names) if names]
    if len(parts) == 2:
        joined = join_meshes(parts)
        return MeshRoles(joined, shard_axis=1, replicate_axes=(0,))
    if dims.shard_names:
        return MeshRoles(parts[0], shard_axis=0)
    return MeshRoles(parts[0], shard_axis=None, replicate_axes=(0,))


def _flattened(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    part = mesh[names]
    return part if len(names) == 1 else part._flatten("_".join(names))


def _check_membership(mesh: DeviceMesh) -> None:
    if not dist.is_initialized():
        raise MeshError(
            f"the process group that {mesh} was built on is gone. Call "
            "torch.distributed.init_process_group() and build the mesh anew."
        )
    forget_destroyed_groups()
    rank, world = dist.get_rank(), dist.get_world_size()
    highest = int(mesh.mesh.max())
    if highest >= world:
        raise MeshError(
            f"{mesh} names rank {highest}, but the process group has only {world} "
            "ranks (0 to {}). Build the mesh from the process group in use.".format(world - 1)
        )
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"rank {rank} of {world} is not part of {mesh}. Call fully_shard only on the mesh's "
            "ranks, or build a mesh that covers every rank which calls it."
        )
    for axis in range(mesh.ndim):
        if mesh.get_group(axis).size() != mesh.size(axis):
            raise MeshError(
                f"axis {axis} of {mesh} has {mesh.size(axis)} ranks, its process group "
                f"{mesh.get_group(axis).size()}. Build the mesh with init_device_mesh."
            )


def default_mesh() -> DeviceMesh:
    """All ranks in one shard axis, on the accelerator if there is one."""
    if not dist.is_initialized():
        _init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = accelerator.type if accelerator is not None else "cpu"
    return init_device_mesh(kind, (dist.get_world_size(),))


def _init_process_group() -> None:
    try:
        dist.init_process_group()
    except Exception as error:
        raise MeshError(
            "fully_shard was called without a process group, and starting one failed: "
            f"{error}. Launch with torchrun, or call torch.distributed.init_process_group() first. "
            "If every setting is right, check that all ranks were started: each waits for the rest."
        ) from error
