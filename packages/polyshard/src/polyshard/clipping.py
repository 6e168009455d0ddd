"""The norm of all gradients, whatever meshes and placements they have, and clipping by it.

``torch.nn.utils.clip_grad_norm_`` stacks the norms of all gradients into one ``DTensor`` and so
refuses parameters on different meshes. Here each gradient's local part is measured, and parts are
added over exactly the mesh axes that shard them: replicas count once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from polyshard._torch_private import local_tensor
from polyshard.errors import NonFiniteError, SettingError

Distinct = Mapping[dist.ProcessGroup, Iterable[Tensor]]
Known = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True)
class _Part:
    """A gradient's local part, and the process groups whose ranks hold different parts of it."""

    local: Tensor
    groups: tuple[dist.ProcessGroup, ...]
    norm: Tensor | None = None
    """Of the local part, where somebody knows it: then ``local`` is not read."""


@torch.no_grad()
def grad_norm(
    parameters: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    *,
    distinct_over: Distinct | None = None,
    known: Known | None = None,
) -> Tensor:
    """The total norm of all gradients; nothing is changed.

    Args:
        parameters: as of :func:`clip_grad_norm_`.
        norm_type: the ``p`` of the p-norm, above 0; may be ``inf``.
        distinct_over: as of :func:`clip_grad_norm_`.
        known: called with a parameter, returns the norm of the local part of its gradient (0-dim,
            at least float32), or ``None``: then the gradient is read. All ranks need not know the
            same.

    Returns:
        A plain 0-dim tensor, the same on all ranks.

    Raises:
        SettingError: for a ``norm_type`` that is not above 0.
    """
    _check_norm_type(norm_type)
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return _total_norm(_parts(tensors, _extra_groups(distinct_over), known), float(norm_type))


def _check_norm_type(norm_type: float) -> None:
    if not norm_type > 0:
        raise SettingError(f"norm_type must be above 0 (or inf), got {norm_type!r}.")


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    distinct_over: Distinct | None = None,
) -> Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``.

    Takes the arguments of ``torch.nn.utils.clip_grad_norm_``. Plain tensors count once, as if they
    were equal on all ranks.

    Args:
        parameters: tensors with gradients, on any mix of meshes, placements and dtypes.
        max_norm: the largest norm allowed.
        norm_type: the ``p`` of the p-norm, above 0; may be ``inf``.
        error_if_nonfinite: raise instead of scaling by a norm that is not finite.
        foreach: accepted for compatibility; parts of one dtype and device are always done together.
        distinct_over: parameters that differ between the ranks of a process group although their
            placements do not say so: experts, or pipeline stages.

    Returns:
        The norm before clipping: a plain 0-dim tensor, the same on all ranks.

    Raises:
        SettingError: for a ``norm_type`` that is not above 0.
        NonFiniteError: on every rank, when asked for.
    """
    del foreach
    _check_norm_type(norm_type)
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    parts = _parts(tensors, _extra_groups(distinct_over))
    total = _total_norm(parts, float(norm_type))
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise NonFiniteError(
            f"the total norm of order {norm_type} of {len(parts)} gradients is {total.item()}; "
            "gradients were left as they are. Look for the first loss that is not finite, or pass "
            "error_if_nonfinite=False."
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for same in _by_kind([part.local for part in parts]):
        torch._foreach_mul_(same, factor.to(same[0].device))
    return total


def _extra_groups(distinct_over: Distinct | None) -> dict[int, tuple[dist.ProcessGroup, ...]]:
    found: dict[int, tuple[dist.ProcessGroup, ...]] = {}
    for group, tensors in (distinct_over or {}).items():
        for tensor in tensors:
            found[id(tensor)] = (*found.get(id(tensor), ()), group)
    return found


def _parts(
    tensors: Iterable[Tensor],
    extra: Mapping[int, tuple[dist.ProcessGroup, ...]],
    known: Known | None = None,
) -> list[_Part]:
    parts = []
    for tensor in tensors:
        gradient = tensor.grad
        if gradient is None:
            continue
        groups = extra.get(id(tensor), ())
        norm = known(tensor) if known is not None else None
        if norm is not None:
            parts.append(_Part(gradient, (*_sharding_groups(tensor), *groups), norm))
        elif isinstance(gradient, DTensor):
            gradient = _without_partial(tensor, gradient)
            groups = (*_sharding_groups(gradient), *groups)
            parts.append(_Part(local_tensor(gradient), groups))
        else:
            parts.append(_Part(gradient, groups))
    return parts


def _sharding_groups(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Of the axes whose ranks hold different parts of ``tensor``."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    # Not is_shard(): torch 2.13 says no for strided shards, which differ between ranks too.
    axes = (a for a, p in enumerate(tensor.placements) if not p.is_replicate())
    return tuple(mesh.get_group(a) for a in axes if mesh.size(a) > 1)


def _without_partial(tensor: Tensor, gradient: DTensor) -> DTensor:
    """``gradient`` with pending sums made: a sum has no norm before it is one."""
    if not any(p.is_partial() for p in gradient.placements):
        return gradient
    placements = [Replicate() if p.is_partial() else p for p in gradient.placements]
    tensor.grad = gradient.redistribute(placements=placements)
    assert isinstance(tensor.grad, DTensor)
    return tensor.grad


def _total_norm(parts: Iterable[_Part], norm_type: float) -> Tensor:
    """The p-norm over all parts: ``max`` for infinity, else a sum of powers."""
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[_Part]] = {}
    for part in parts:
        by_groups.setdefault(part.groups, []).append(part)
    infinite = math.isinf(norm_type)
    operation = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
    sums = []
    for groups, members in by_groups.items():
        value = _local_power(members, norm_type)
        for group in groups:
            dist.all_reduce(value, operation, group=group)
        sums.append(value)
    if not sums:
        return torch.tensor(0.0)
    stacked = torch.stack([value.to(sums[0].device) for value in sums])
    return stacked.max() if infinite else stacked.sum().pow(1.0 / norm_type)


def _local_power(parts: list[_Part], norm_type: float) -> Tensor:
    """Sum of ``|x|^p`` over all elements, in fp32 at least (the maximum, for infinity)."""
    device = parts[0].local.device
    # Of all parts, those without elements here included: the ranks of a sum must agree on it.
    dtype = torch.float32
    for part in parts:
        dtype = torch.promote_types(dtype, part.local.dtype)
    total = torch.zeros((), dtype=dtype, device=device)
    known = [part.norm.to(device) for part in parts if part.norm is not None]
    every = [torch.stack(known)] if known else []
    for same in _by_kind([part.local for part in parts if part.norm is None]):
        at_least = torch.promote_types(same[0].dtype, torch.float32)
        every.append(torch.stack(torch._foreach_norm(same, norm_type, dtype=at_least)).to(device))
    for norms in every:
        wide = norms.to(dtype)
        value = wide.max() if math.isinf(norm_type) else wide.pow(norm_type).sum()
        total = torch.maximum(total, value) if math.isinf(norm_type) else total + value
    return total


def _by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors that foreach operations take together; empty ones are left out."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())
