"""The norm of all gradients in an order that no mesh changes, and clipping by it.

[Note: rows]
Whatever the number of ranks, an index of the dim that is sharded is on one of them, whole: a *row*.
So its part of the sum is made there, element by element in a fixed order (:func:`sum_halves`). Then
ranks put the rows of all parameters together, as a sum in which each row has one term that is not
zero, which no order can change; and everybody adds rows up in a fixed order. Pieces of tensor
parallelism (see [Note: pieces] in parts.py) have sums of their own, which are put together in the
same way. In fp64, so that the result is also better than torch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from polyshard.clipping import resting
from polyshard.errors import NonFiniteError
from polyshard.plugins.seams import local_of
from polyshard_reproducible.errors import ReproducibleError
from polyshard_reproducible.parts import Axis, few_rows, part_of
from polyshard_reproducible.tree import sum_halves


@dataclass(frozen=True)
class _Rows:
    """A gradient's local part, and where its rows are among all of its piece."""

    local: Tensor
    """``[rows, elements of a row]``."""
    count: int
    start: int = 0
    group: dist.ProcessGroup | None = None
    """Whose ranks have the others."""
    pieces: tuple[Axis, ...] = ()
    """Whose ranks have the other pieces."""


@torch.no_grad()
def grad_norm(parameters: Tensor | Iterable[Tensor]) -> Tensor:
    """The 2-norm of all gradients: the same bits at every world size. Nothing is changed.

    Parameters without a gradient are left out. Every rank calls it with the same parameters.

    Returns:
        A plain 0-dim fp32 tensor, the same on all ranks.

    Raises:
        ReproducibleError: for gradients that are pending sums, or whose rows are cut more than
            once.
    """
    tensors = resting(parameters)
    parts = [_rows_of(p, p.grad) for p in tensors if p.grad is not None]
    if not parts:
        return torch.tensor(0.0, device="cpu")
    sums = torch.stack([sum_halves(rows) for rows in _whole(parts)])
    return sum_halves(_over_pieces(sums, parts)).sqrt().float()


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients in place so that their 2-norm is at most ``max_norm``, by :func:`grad_norm`.

    Where it is not finite they stay as they are: ``NonFinite`` of polyshard-resilience names them.

    Returns:
        The norm before clipping.

    Raises:
        NonFiniteError: on every rank, when asked for; gradients are left as they are.
        ReproducibleError: as :func:`grad_norm`.
    """
    tensors = resting(parameters)
    norm = grad_norm(tensors)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise NonFiniteError(
            f"the norm of the gradients is {norm.item()}; they were left as they are. Look for the "
            "first loss that is not finite, or pass error_if_nonfinite=False."
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    factor = torch.where(norm.isfinite(), factor, 1.0)  # a guard can name them, and steps are none
    for parameter in tensors:
        if parameter.grad is not None:
            local = local_of(parameter.grad)
            local.mul_(factor.to(local.device))
    return norm


def _rows_of(parameter: Tensor, gradient: Tensor) -> _Rows:
    part = part_of(gradient)
    if part is None:
        assert isinstance(gradient, DTensor)
        raise ReproducibleError(
            f"reproducible: the norm of a gradient {tuple(parameter.shape)} that is "
            f"{gradient.placements} has no rows that stay whole at every world size. Only "
            "tensors that a data axis divides by Shard(dim), after tensor parallelism if any, can "
            "be clipped so."
        )
    cut = part.cut
    if cut is None:
        return _Rows(_as_rows(part.local, 0), part.shape[0] if part.shape else 1)
    rows = _as_rows(part.local, cut.dim)
    return _Rows(rows, part.shape[cut.dim], cut.start, cut.axis.group, part.pieces)


def _as_rows(local: Tensor, dim: int) -> Tensor:
    if local.ndim == 0:
        return local.view(1, 1)
    moved = local.movedim(dim, 0)
    return moved.reshape(moved.shape[0], -1) if local.numel() else local.new_zeros(0, 1)


def _whole(parts: Sequence[_Rows]) -> list[Tensor]:
    """The squares of every row of every gradient (of this rank's piece), summed."""
    device = parts[0].local.device
    by_group: dict[dist.ProcessGroup | None, list[int]] = {}
    for index, part in enumerate(parts):
        by_group.setdefault(part.group, []).append(index)
    found: dict[int, Tensor] = {}
    for group, indices in by_group.items():
        counts = [parts[i].count for i in indices]
        rows = torch.zeros(sum(counts), dtype=torch.float64, device=device)
        for index, own in zip(indices, rows.split(counts), strict=True):
            _square(parts[index], own)
            found[index] = own
        if group is not None:
            dist.all_reduce(rows, group=group)
    return [found[i] for i in range(len(parts))]


def _over_pieces(sums: Tensor, parts: Sequence[_Rows]) -> Tensor:
    """Of this rank's pieces, ``[gradients]``: those of whole gradients, the same on all ranks."""
    by_axes: dict[tuple[Axis, ...], list[int]] = {}
    for index, part in enumerate(parts):
        by_axes.setdefault(part.pieces, []).append(index)
    for axes, indices in by_axes.items():
        for axis in reversed(axes):
            table = sums.new_zeros(len(indices), axis.size)
            table[:, axis.rank] = sums[indices]
            dist.all_reduce(table, group=axis.group)  # one term of each is not zero
            sums[indices] = sum_halves(table)
    return sums


def _square(part: _Rows, rows: Tensor) -> None:
    """Put the squares of the local rows in their places."""
    start = part.start
    for some in few_rows(part.local):
        plain = torch.view_as_real(some).flatten(1) if some.is_complex() else some
        squares = plain.to(torch.float64, copy=True)
        rows[start : start + some.shape[0]] = sum_halves(squares.square_())
        start += some.shape[0]
