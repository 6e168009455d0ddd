"""Applying a checked plan: parameters become ``DTensor`` s, modules get their hooks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from polyshard_tensor_parallel._torch_private import local_tensor, plain
from polyshard_tensor_parallel.plans.checking import DISTRIBUTING, Checked, tied
from polyshard_tensor_parallel.report import ParameterReport, Report


def apply(checked: Checked, model: nn.Module, mesh: DeviceMesh) -> Report:
    """Change ``model`` in place.

    Values are those of the first rank of ``mesh``: torch scatters the parameters of the plan from
    it, and the others are broadcast, so ranks may have drawn different ones. Tied parameters stay
    tied. Parameters on the meta device stay there.
    """
    ties = tied(model)
    for one in checked.assignments:
        parallelize_module(one.module, mesh, one.style)
        one.module.register_forward_hook(_finish)
    for owners in ties:
        _, first, name = owners[0]
        for _, module, other in owners[1:]:
            setattr(module, other, getattr(first, name))
    for count in checked.counts:
        setattr(count.module, count.attribute, count.after)
    synchronize(model, mesh)
    return _report(checked, model, mesh)


def _finish(module: nn.Module, args: object, output: object) -> Tensor | None:
    """Wait for the collective that a style left pending in a module's output.

    A block compiled by AOT autograd that is handed a pending result gives its producer no gradient
    (torch 2.13), and nothing says so. Inside a compiled block nothing is pending.
    """
    if torch.compiler.is_compiling() or not isinstance(output, Tensor):
        return None
    return plain(output)


@torch.no_grad()
def synchronize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make what all ranks of ``mesh`` must hold alike equal to what its first rank holds.

    Parameters and buffers that are not ``DTensor`` s, and replicated ones; those on the meta device
    are left. A collective over ``mesh``.
    """
    if mesh.size() == 1:
        return
    group = mesh.get_group()
    source = dist.get_global_rank(group, 0)
    for tensor in (*model.parameters(), *model.buffers()):
        local = _alike_part(tensor, mesh)
        if local is not None and local.device.type != "meta" and local.numel():
            whole = local if local.is_contiguous() else local.contiguous()
            dist.broadcast(whole, source, group=group)
            if whole is not local:
                local.copy_(whole)


def _alike_part(tensor: Tensor, mesh: DeviceMesh) -> Tensor | None:
    """What this rank holds of ``tensor`` if other ranks of the 1-D ``mesh`` hold the same."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    names, own = tensor.device_mesh.mesh_dim_names, mesh.mesh_dim_names
    axes = range(tensor.device_mesh.ndim)
    if names is not None and own is not None:
        axes = range(names.index(own[0]), names.index(own[0]) + 1) if own[0] in names else range(0)
    if any(not tensor.placements[a].is_replicate() for a in axes):
        return None
    return local_tensor(tensor).detach()


def _report(checked: Checked, model: nn.Module, mesh: DeviceMesh) -> Report:
    styles = {
        id(one.module): type(one.style).__name__
        for one in checked.assignments
        if isinstance(one.style, DISTRIBUTING)
    }
    parameters, alike = [], []
    for module_name, module in model.named_modules():
        for name, value in module.named_parameters(recurse=False):
            fqn = f"{module_name}.{name}" if module_name else name
            if not isinstance(value, DTensor):
                alike.append(fqn)
                continue
            style = styles.get(id(module), "custom")
            placement = ", ".join(map(str, value.placements))
            local = tuple(local_tensor(value).shape)
            parameters.append(ParameterReport(fqn, style, placement, tuple(value.shape), local))
    inputs = tuple(
        f"{one.name or '(model)'}: {type(one.style).__name__}"
        for one in checked.assignments
        if id(one.module) not in styles
    )
    counts = tuple(f"{c.name}.{c.attribute}: {c.before} -> {c.after}" for c in checked.counts)
    return Report(mesh.size(), tuple(parameters), tuple(alike), inputs, counts)
