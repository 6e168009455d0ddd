"""Which axis of a device mesh does what. `axis` is a mesh axis, `dim` a tensor dim."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polyshard.errors import MeshError


@dataclass(frozen=True, eq=False)
class MeshRoles:
    """A data-parallel mesh with a role for each axis.

    ``shard_axis`` is the axis parameters are sharded over, ``replicate_axis`` the one shards are
    repeated over (``None`` on a 1-D mesh).
    """

    mesh: DeviceMesh
    shard_axis: int
    replicate_axis: int | None = None

    @cached_property
    def shard_group(self) -> dist.ProcessGroup:
        """Process group of the shard axis."""
        return self.mesh.get_group(self.shard_axis)

    @cached_property
    def shard_rank(self) -> int:
        """This rank's position on the shard axis."""
        return self.mesh.get_local_rank(self.shard_axis)

    @cached_property
    def shard_size(self) -> int:
        """Ranks on the shard axis."""
        return self.mesh.size(self.shard_axis)

    @cached_property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """Process group of the replicate axis, if any."""
        return None if self.replicate_axis is None else self.mesh.get_group(self.replicate_axis)

    @cached_property
    def replicate_size(self) -> int:
        """Ranks on the replicate axis; 1 without one."""
        return 1 if self.replicate_axis is None else self.mesh.size(self.replicate_axis)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the whole mesh, in ascending order."""
        return tuple(sorted(int(rank) for rank in self.mesh.mesh.flatten()))

    @property
    def data_parallel_size(self) -> int:
        """Ranks whose gradients are averaged."""
        return self.shard_size * self.replicate_size

    @cached_property
    def device(self) -> torch.device:
        """The device this rank computes on."""
        kind = self.mesh.device_type
        if kind == "cpu":
            return torch.device("cpu")
        return torch.device(kind, torch.get_device_module(kind).current_device())

    def describe(self) -> str:
        """Axes with names and sizes, as they appear in a plan."""
        names = self.mesh.mesh_dim_names or tuple(str(i) for i in range(self.mesh.ndim))
        roles = {self.shard_axis: "shard", self.replicate_axis: "replicate"}
        axes = (f"{names[a]}={self.mesh.size(a)} ({roles[a]})" for a in range(self.mesh.ndim))
        return f"{self.mesh.device_type} " + " x ".join(axes)


def resolve_mesh(mesh: DeviceMesh | None) -> MeshRoles:
    """Give every axis of ``mesh`` a role; without a mesh, shard over all ranks.

    Raises:
        MeshError: for a mesh of the wrong rank, one this process is not part of, or one whose
            process groups are gone.
    """
    mesh = default_mesh() if mesh is None else mesh
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}: {mesh!r}")
    if mesh.ndim not in (1, 2):
        raise MeshError(
            f"fully_shard expects a 1D mesh (shard) or a 2D mesh (replicate, shard), got {mesh}. "
            "Pass a slice of it, such as mesh['dp']."
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise MeshError(
            f"a 2D mesh needs names for its axes, got {mesh}. Pass mesh_dim_names=('replicate', "
            "'shard') to init_device_mesh."
        )
    _check_membership(mesh)
    if mesh.ndim == 1:
        return MeshRoles(mesh, shard_axis=0)
    return MeshRoles(mesh, shard_axis=1, replicate_axis=0)


def _check_membership(mesh: DeviceMesh) -> None:
    if not dist.is_initialized():
        raise MeshError(
            f"the process group that {mesh} was built on is gone. Call "
            "torch.distributed.init_process_group() and build the mesh anew."
        )
    rank, world = dist.get_rank(), dist.get_world_size()
    if int(mesh.mesh.max()) >= world:
        raise MeshError(
            f"{mesh} names rank {int(mesh.mesh.max())}, but the process group has only {world} "
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
    accelerator = torch.accelerator.current_accelerator()
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
