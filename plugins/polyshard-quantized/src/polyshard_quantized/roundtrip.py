"""What a format makes of values, without any process group."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from polyshard.params.parameter import at_rest
from polyshard.sharding.layout import ParameterShape, plan_layout
from polyshard_quantized.formats.base import BlockFormat
from polyshard_quantized.layout.payload import plan_payload
from polyshard_quantized.transfers.gather import BoundGather
from polyshard_quantized.workspace import Workspace


def round_trip(values: Tensor, form: BlockFormat, *, dim: int = 0) -> Tensor:
    """What every rank computes with instead of ``values``, in the same shape and dtype.

    Args:
        values: at least one dim, ``float32``, ``bfloat16`` or ``float16``.
        form: the format.
        dim: the sharded dim; blocks lie within what is behind it.
    """
    if values.numel() == 0:
        return values.clone()
    row = math.prod(values.shape[dim + 1 :])
    flat = values.detach().reshape(-1)
    shape = ParameterShape("values", (flat.numel() // row, row))
    layout = plan_layout([shape], 1, flat.itemsize, 0)
    plan = plan_payload(layout, form, {}, frozenset(), values.dtype)
    codec = BoundGather(plan, Workspace())
    payload = torch.empty(plan.nbytes, dtype=torch.uint8, device=values.device)
    shard = flat.new_zeros(layout.shard_numel)
    shard[: flat.numel()] = flat
    codec.encode(shard, payload)
    out = torch.empty_like(flat)
    codec.decode(payload[None], [out[None]])
    return out.view(values.shape)


def relative_errors(model: nn.Module, formats: Mapping[str, BlockFormat]) -> dict[str, float]:
    """``|decoded - value| / |value|`` (2-norms) of parameters, by name. A collective.

    Args:
        model: the outermost sharded module; every rank of its mesh calls with the same arguments.
        formats: by parameter name; others are skipped.
    """
    names, sums, meshes = [], [], []
    with torch.no_grad():
        for name, held in model.named_parameters():
            parameter = at_rest(held)
            if name not in formats or not isinstance(parameter, DTensor):
                continue
            # Data-parallel axes come first; blocks are cut along the dim that they shard.
            dims = [p.dim for p in parameter.placements if isinstance(p, Shard)]
            local = parameter.to_local()
            decoded = round_trip(local, formats[name], dim=dims[0] if dims else 0)
            wide = local.double()
            error = (decoded.double() - wide).square().sum()
            names.append(name)
            sum_ = torch.stack((error, wide.square().sum()))
            sums.append(sum_.to(parameter.device_mesh.device_type))  # shards may rest elsewhere
            meshes.append(parameter.device_mesh)
    for total, mesh in zip(sums, meshes, strict=True):
        for axis in range(mesh.ndim):
            dist.all_reduce(total, group=mesh.get_group(axis))
    found = {}
    for name, total in zip(names, sums, strict=True):
        error, norm = total.tolist()
        found[name] = math.sqrt(error / norm) if norm else 0.0
    return found
