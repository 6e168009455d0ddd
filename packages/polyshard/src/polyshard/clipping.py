"""The norm of all gradients, whatever meshes and placements they have, and clipping by it.

``torch.nn.utils.clip_grad_norm_`` stacks the norms of all gradients into one ``DTensor`` and so
refuses parameters on different meshes. Here each gradient's local part is measured, and parts are
added over exactly the mesh axes that shard them: replicas count once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import get_process_group_ranks
from torch.distributed.tensor import DTensor, Replicate

from polyshard._torch.private import local_tensor, reaches_host
from polyshard.errors import NonFiniteError, SettingError
from polyshard.params.parameter import at_rest

# [Note: equal meshes]
# Meshes made alike are equal, and each has process groups of its own. torch remembers what the
# operations on a DTensor return by the mesh they were called with, and so returns tensors on an
# equal mesh of before: which one, depends on what a process has computed until then. Gradients
# are results of operations; parameters seldom are, so their groups are taken. Groups of the same
# ranks in the same order are one here: what is added together, and so how sums are rounded, must
# not depend on that memory.

Groups = tuple[dist.ProcessGroup, ...]
Distinct = Mapping[dist.ProcessGroup, Iterable[Tensor]]
_Key = tuple[Groups, Groups]
Known = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True)
class _Part:
    """A gradient's local part, and the process groups whose ranks hold different parts of it.

    Ranks of ``distinct`` hold different gradients altogether.
    """

    local: Tensor
    groups: Groups
    distinct: Groups = ()
    norm: Tensor | None = None
    """Of the local part, where it is known already: then ``local`` is not read."""


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
        norm_type: the ``p`` of the p-norm. As in torch it may be infinite, negative, or 0: how many
            gradients are not all zero.
        distinct_over: as of :func:`clip_grad_norm_`.
        known: called with a parameter, returns the norm of the local part of its gradient (0-dim,
            at least float32), or ``None``: then the gradient is read. All ranks need not know the
            same.

    Returns:
        A plain 0-dim tensor, the same on all ranks.

    Raises:
        SettingError: for a ``norm_type`` that is no number.
    """
    return _measured(parameters, norm_type, distinct_over, known)[1]


def _measured(
    parameters: Tensor | Iterable[Tensor],
    norm_type: float,
    distinct_over: Distinct | None,
    known: Known | None = None,
) -> tuple[list[_Part], Tensor]:
    """What there is of gradients, and the norm of all."""
    _check_norm_type(norm_type)
    tensors = resting(parameters)
    parts = _parts(tensors, _extra_groups(distinct_over), known)
    device = tensors[0].device if tensors else torch.device("cpu")
    return parts, _total_norm(parts, float(norm_type), tuple(distinct_over or ()), device)


def _check_norm_type(norm_type: float) -> None:
    try:
        usable = not math.isnan(float(norm_type))
    except (TypeError, ValueError):
        usable = False
    if not usable:
        raise SettingError(f"norm_type must be a number, 0 and infinities too, got {norm_type!r}.")


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
        norm_type: the ``p`` of the p-norm. As in torch it may be infinite, negative, or 0: how many
            gradients are not all zero.
        error_if_nonfinite: raise instead of scaling by a norm that is not finite.
        foreach: accepted for compatibility; parts of one dtype and device are always done together.
        distinct_over: parameters that differ between the ranks of a process group although their
            placements do not say so: experts, or pipeline stages. All ranks of a group name it, in
            the same order of groups, those without such gradients too.

    Returns:
        The norm before clipping: a plain 0-dim tensor, the same on all ranks.

    Raises:
        SettingError: for a ``norm_type`` that is no number.
        NonFiniteError: on every rank, when asked for.
    """
    del foreach
    parts, total = _measured(parameters, norm_type, distinct_over)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise NonFiniteError(
            f"the total norm of order {norm_type} of {len(parts)} gradients is {total.item()}; "
            "gradients were left as they are. Look for the first loss that is not finite, or pass "
            "error_if_nonfinite=False."
        )
    _scale([part.local for part in parts], max_norm, total)
    return total


@torch.no_grad()
def clip_grads_with_norm_(parameters: Iterable[Tensor], max_norm: float, total: Tensor) -> None:
    """The second half of :func:`clip_grad_norm_`: scale by a norm that is known.

    As ``torch.nn.utils.clip_grads_with_norm_``.
    """
    _scale(local_gradients(parameters), max_norm, total)


def _scale(locals_: Iterable[Tensor], max_norm: float, total: Tensor) -> None:
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for same in by_kind(locals_):
        torch._foreach_mul_(same, factor.to(same[0].device))


def resting(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """``parameters``, each that modules hold gathered and without a gradient as its sharded form.

    See [Note: from leaf to shard].
    """
    tensors = [parameters] if isinstance(parameters, Tensor) else parameters
    return [at_rest(t) if t.grad is None else t for t in tensors]


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """This rank's parts of the gradients that there are, in order."""
    gradients = [p.grad for p in resting(parameters) if p.grad is not None]
    return [local_tensor(g) if isinstance(g, DTensor) else g for g in gradients]


def _extra_groups(distinct_over: Distinct | None) -> dict[int, Groups]:
    found: dict[int, Groups] = {}
    for group, tensors in (distinct_over or {}).items():
        for tensor in resting(tensors):
            found[id(tensor)] = (*found.get(id(tensor), ()), group)
    return found


def _parts(
    tensors: Iterable[Tensor],
    extra: Mapping[int, Groups],
    known: Known | None = None,
) -> list[_Part]:
    parts = []
    for tensor in tensors:
        gradient = tensor.grad
        if gradient is None:
            continue
        distinct = extra.get(id(tensor), ())
        norm = known(tensor) if known is not None else None
        if norm is not None:
            parts.append(_Part(gradient, _sharding_groups(tensor), distinct, norm))
        elif isinstance(gradient, DTensor):
            gradient = _without_partial(tensor, gradient)
            groups = _sharding_groups(gradient, tensor)
            parts.append(_Part(local_tensor(gradient), groups, distinct))
        else:
            parts.append(_Part(gradient, (), distinct))
    return parts


def _sharding_groups(tensor: Tensor, parameter: Tensor | None = None) -> Groups:
    """Of the axes whose ranks hold different parts of ``tensor``.

    See [Note: equal meshes]: those of ``parameter``, if its mesh is equal.
    """
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    if isinstance(parameter, DTensor) and parameter.device_mesh == mesh:
        mesh = parameter.device_mesh
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


def _total_norm(parts: Sequence[_Part], order: float, over: Groups, device: torch.device) -> Tensor:
    """The norm of the norms of whole gradients, as torch defines it for every order.

    Args:
        parts: of this rank; there may be none where other ranks have some.
        order: of the norm.
        over: the groups whose ranks have different gradients, in the same order on all ranks.
        device: where ``parts`` would be.
    """
    if not parts and not over:
        return torch.tensor(0.0, device="cpu")
    # From all gradients: a rank whose parts are empty has to send what the others send.
    kinds = (_real(part.local.dtype) for part in parts)
    dtype = functools.reduce(torch.promote_types, kinds, torch.float32)
    sums: dict[Groups, list[Tensor]] = {}
    for (groups, distinct), members in _by_groups(parts).items():
        value = _counts(members).to(dtype) if order == 0 else _local_power(members, order, dtype)
        for group in groups:
            value = _reduced(value, order, group)
        if order == 0:  # how many gradients are not all zero
            value = (value > 0).sum().to(dtype)
        sums.setdefault(distinct, []).append(value)
    for place, group in enumerate(over):
        # [Note: gradients of other ranks]
        # A rank of the group may have no gradient, or none that differs over a later group too.
        # It takes part in the same reduction nevertheless: of a sum for each set of later groups.
        # So the group says on which device, and not what this rank has.
        where = torch.device("cpu") if reaches_host(group) else _accelerator()
        later = [s for n in range(len(over)) for s in combinations(over[place + 1 :], n)]
        own = [
            _combined(sums.pop((group, *rest), []), order, where).to(where, torch.float64)
            for rest in later
        ]
        reduced = _reduced(torch.stack(own), order, group)
        for rest, value in zip(later, reduced.to(dtype), strict=True):
            sums.setdefault(rest, []).append(value)
    total = _combined(sums.get((), []), order, device).to(device)
    return total if math.isinf(order) or order == 0 else total.pow(1.0 / order)


def _accelerator() -> torch.device:
    """The device of this process, for a group that cannot reduce on the CPU."""
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _combined(values: Sequence[Tensor], order: float, device: torch.device) -> Tensor:
    """The sum of ``values``, or their largest or smallest; what changes neither without any."""
    if not values:
        return torch.tensor(math.inf if order == -math.inf else 0.0, device=device)
    stacked = torch.stack([value.to(values[0].device) for value in values])
    if math.isinf(order):
        return stacked.max() if order > 0 else stacked.min()
    return stacked.sum()


def _reduced(values: Tensor, order: float, group: dist.ProcessGroup) -> Tensor:
    """``values``, each combined with those of the other ranks of ``group``."""
    if not math.isinf(order):
        dist.all_reduce(values, group=group)
        return values
    # The largest of numbers is one where a backend drops what is none (gloo compares by ``<``).
    sign = 1.0 if order > 0 else -1.0
    is_none = values.isnan()
    both = torch.stack([(sign * values).masked_fill(is_none, -math.inf), is_none.to(values.dtype)])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return (sign * both[0]).masked_fill(both[1] > 0, math.nan)


def _by_groups(parts: Sequence[_Part]) -> dict[_Key, list[_Part]]:
    """Parts that are added over the same ranks, in order; see [Note: equal meshes]."""
    first: dict[object, _Key] = {}
    known: dict[_Key, _Key] = {}
    by_groups: dict[_Key, list[_Part]] = {}
    for part in parts:
        key = part.groups, part.distinct
        if key not in known:
            ranks = tuple(tuple(tuple(get_process_group_ranks(g)) for g in gs) for gs in key)
            known[key] = first.setdefault(ranks, key)
        by_groups.setdefault(known[key], []).append(part)
    return by_groups


def _counts(parts: list[_Part]) -> Tensor:
    """For each gradient, how many elements of the local part are not zero."""
    device = parts[0].local.device
    return torch.stack([part.local.count_nonzero().to(device) for part in parts])


def _local_power(parts: list[_Part], order: float, dtype: torch.dtype) -> Tensor:
    """Sum of ``|x|^p`` over all elements (the largest or smallest ``|x|``, for infinities)."""
    device = parts[0].local.device
    known = [part.norm.to(device) for part in parts if part.norm is not None]
    every = [torch.stack(known)] if known else []
    for same in by_kind([part.local for part in parts if part.norm is None]):
        at_least = torch.promote_types(same[0].dtype, torch.float32)
        every.append(torch.stack(torch._foreach_norm(same, order, dtype=at_least)).to(device))
    if not every:
        nothing = math.inf if order == -math.inf else 0.0
        return torch.full((), nothing, dtype=dtype, device=device)
    norms = torch.cat([norms.to(dtype) for norms in every])
    if math.isinf(order):
        return norms.max() if order > 0 else norms.min()
    return norms.pow(order).sum()


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors that foreach operations take together; empty ones are left out."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())
