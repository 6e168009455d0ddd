"""A parameter on a tensor-parallel mesh as what FSDP shards, and back.

[Note: gradients]
The unsharded parameter is a ``DTensor`` leaf, so autograd leaves a ``DTensor`` gradient, placed as
its last operation happened to place it, perhaps with a collective pending. A gradient is brought to
the placements of its parameter before FSDP reduces it. Where that means a sum over the model axes
(``Partial``), it is made in the policy's reduce dtype if that is wider: torch's FSDP2 makes it in
the gradient's own (pytorch#190626). Data axes of a full SPMD mesh are left to FSDP's reduction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from polyshard.plugins.seams import ParamInfo
from polyshard_tensor_parallel._torch_private import (
    local_tensor,
    mark_flattened,
    waited,
    wrap_local,
)
from polyshard_tensor_parallel.forms.axes import check_whole, split_axes


@dataclass(frozen=True)
class Spec:
    """What turns a local tensor back into the ``DTensor`` it was: all but its dtype."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Alike:
    """A parameter that every rank of the model axes holds alike; it stays a plain tensor."""


def flatten(tensor: DTensor, param: ParamInfo | None) -> tuple[Tensor, Spec]:
    """The local tensor of a parameter, or of a gradient placed as its parameter.

    Args:
        tensor: on a mesh with model axes, and perhaps data axes.
        param: of the parameter; ``None`` in FSDP1, which hands over parameters only.
    """
    if param is None:
        check_whole("a parameter", tuple(tensor.placements), split_axes(tensor.device_mesh, None))
    elif param.placements not in (None, tuple(tensor.placements)):
        tensor = _placed(tensor, param)
    spec = Spec(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())
    local = waited(local_tensor(tensor))
    if param is None:  # FSDP1 takes the answer for the parameter itself
        local.requires_grad_(tensor.requires_grad)
    return local, spec


def _placed(gradient: DTensor, param: ParamInfo) -> DTensor:
    """``gradient`` with the placements of its parameter. See [Note: gradients]."""
    assert param.placements is not None
    data = split_axes(gradient.device_mesh, param.mesh).data
    found = tuple(gradient.placements)
    wanted = tuple(
        found[axis] if axis in data else placement
        for axis, placement in enumerate(param.placements)
    )
    if wanted == found:
        return gradient
    wide = param.reduce_dtype
    sums = any(p.is_partial() for a, p in enumerate(found) if a not in data)
    if sums and wide is not None and wide.itemsize > gradient.dtype.itemsize:
        return cast("DTensor", gradient.to(wide)).redistribute(placements=wanted)
    return gradient.redistribute(placements=wanted)


def unflatten(tensor: Tensor, spec: Spec) -> DTensor:
    """The ``DTensor`` around ``tensor``, without a copy and in its dtype.

    FSDP1 asks inside autograd: then the result takes part in it, and its gradient is waited for.
    """
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return wrap_local(tensor, spec.mesh, spec.placements, spec.shape)
    result = DTensor.from_local(
        tensor,
        spec.mesh,
        spec.placements,
        run_check=False,
        shape=spec.shape,
        stride=spec.stride,
    )
    tensor.register_hook(waited)
    mark_flattened(result)
    return result
