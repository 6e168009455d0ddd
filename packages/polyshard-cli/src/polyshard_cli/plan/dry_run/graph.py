"""The autograd graph around units, in which one node stands for each.

It hands out shapes in forward and gradients in backward when a unit would, so that what lies
between units is computed in its order, beside no more memory than in a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from typing_extensions import override

from polyshard_cli.plan.dry_run.recorder import Account, Recorder


class _Unit(torch.autograd.Function):
    """Outputs and gradients of a unit, whose cost was booked elsewhere."""

    @staticmethod
    @override
    def forward(
        ctx: Any, recorder: Recorder, likes: Sequence[Tensor], anchor: Tensor, *given: Tensor
    ) -> tuple[Tensor, ...]:
        del anchor
        ctx.recorder = recorder
        with recorder.on(Account()):
            ctx.templates = list(map(without_memory, given))
            made = tuple(map(torch.empty_like, likes))
        pairs = zip(likes, made, strict=True)
        ctx.mark_non_differentiable(*(new for like, new in pairs if not like.requires_grad))
        return made

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        del gradients
        with ctx.recorder.on(Account()):
            return None, None, None, *map(torch.empty_like, ctx.templates)


def stand_in(recorder: Recorder, given: Sequence[Tensor], out: Any) -> Any:
    """What a unit returns that is like ``out``.

    Args:
        recorder: whose accounts are spared.
        given: its inputs that ask for gradients.
        out: the tree of tensors that such a unit returned before.
    """
    leaves, spec = tree_flatten(out)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    likes = [leaves[index] for index in places]
    anchor = torch.empty((), device="cpu", requires_grad=any(like.requires_grad for like in likes))
    made = _Unit.apply(recorder, likes, anchor, *given)  # type: ignore[no-untyped-call]
    for index, tensor in zip(places, made, strict=True):
        leaves[index] = tensor
    return tree_unflatten(leaves, spec)


def without_memory(tensor: Tensor) -> Tensor:
    """One of the same shape and dtype, all of whose elements are one."""
    if isinstance(tensor, DTensor):
        return DTensor.from_local(
            without_memory(tensor.to_local()),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return tensor.new_empty(()).expand(tensor.shape)


def leaves_behind(node: Any) -> set[int]:
    """Leaves, by ``id``, that gradients of what ``node`` made reach without passing a unit."""
    found: set[Any] = set()
    leaves: set[int] = set()
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        elif node is not None and node not in found and not _is_unit(node):
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return leaves


def _is_unit(node: Any) -> bool:
    return isinstance(node, _Unit._backward_cls)
