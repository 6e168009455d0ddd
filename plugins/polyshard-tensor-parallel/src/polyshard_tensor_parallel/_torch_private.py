"""Every private torch name of this distribution, except those of FSDP1's sharded tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._common_utils import _set_fsdp_flattened
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = [
    "is_strided",
    "join_meshes",
    "local_tensor",
    "mark_flattened",
    "plain",
    "root_mesh",
    "strided_shard",
    "waited",
    "wrap_local",
]


def join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes of several slices of one root mesh, in order."""
    return DeviceMesh._concatenate(list(meshes))


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that ``mesh`` is a slice of."""
    return mesh._get_root_mesh()


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Sharded on a dim that ``split_factor`` shards on later axes cut before.

    ``_StridedShard`` of torch 2.13: the tensor is cut into ``split_factor`` pieces first, and each
    piece into one chunk for each rank of the axis.
    """
    return _StridedShard(dim, split_factor=split_factor)


def is_strided(placement: Placement) -> bool:
    """Whether ``placement`` is what :func:`strided_shard` makes."""
    return isinstance(placement, _StridedShard)


def wrap_local(
    local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
) -> DTensor:
    """A contiguous ``DTensor`` of global ``shape`` around ``local`` itself, outside autograd."""
    strides = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, strides, local.dtype))
    return DTensor(local, spec, requires_grad=False)


def local_tensor(value: DTensor) -> Tensor:
    """The local tensor itself; ``to_local()`` would return an autograd view of it."""
    return value._local_tensor


def waited(tensor: Tensor) -> Tensor:
    """``tensor`` with its collective done, if one is pending."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


class _Plain(torch.autograd.Function):
    """Waits in forward; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: object, tensor: AsyncCollectiveTensor) -> Tensor:
        waited: Tensor = tensor.trigger_wait()
        return waited

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


def plain(tensor: Tensor) -> Tensor:
    """What ``tensor`` is once its collective is done, for autograd too."""
    if not isinstance(tensor, AsyncCollectiveTensor):
        return tensor
    found: Tensor = _Plain.apply(tensor)  # type: ignore[no-untyped-call]
    return found


def mark_flattened(tensor: Tensor) -> None:
    """Tell FSDP1 that ``tensor`` stands for a parameter it flattened."""
    _set_fsdp_flattened(tensor)
