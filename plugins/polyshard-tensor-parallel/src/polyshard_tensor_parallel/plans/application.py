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
        trains = {name: p.requires_grad for name, p in one.module.named_parameters()}
        parallelize_module(one.module, mesh, one.style)
        for name, parameter in one.module.named_parameters():
            # SequenceParallel makes parameters anew, all of them trainable.
            parameter.requires_grad_(trains.get(name, parameter.requires_grad))
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
            # Where a group takes tensors of its device only, those are sent.
            whole = local.to(mesh.device_type).contiguous()
            dist.broadcast(whole, source, group=group)
            if whole is not local:
                local.copy_(whole)


def _alike_part(tensor: Tensor, mesh: DeviceMesh) -> Tensor | None:
    """What this rank holds of ``tensor`` if other ranks of the 1-D ``mesh`` hold the same."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if any(not tensor.placements[axis].is_replicate() for axis in _shared_axes(tensor, mesh)):
        return None
    return local_tensor(tensor).detach()


def _shared_axes(tensor: DTensor, mesh: DeviceMesh) -> list[int]:
    """Axes of the mesh of ``tensor`` along which ranks of the 1-D ``mesh`` lie apart.

    Whatever the axes are called: experts have one of their own over the same ranks. Ranks that are
    on other slices of the same shape are at the same places there.
    """
    theirs = tensor.device_mesh.mesh
    places = [(theirs == rank).nonzero() for rank in mesh.mesh.flatten().tolist()]
    found = torch.cat(places)
    return [axis for axis in range(theirs.ndim) if found[:, axis].unique().numel() > 1]


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
