"""Functional collectives over gloo whose results Python makes.

[Note: results of functional collectives]
``DTensor`` communicates by torch's functional collectives, which make their results in C++. Over
gloo that corrupts the heap now and then (torch 2.13): of processes of one rank that gather 36
numbers in a loop, without polyshard, all crashed within seconds with eight calls under way, and two
of six within a minute with one call at a time, while the processors were busy. None crashed where
Python had made the results. Tests run tens of thousands of such calls, so ranks of tests use these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_work, _resolve_process_group

__all__ = ["make_results_in_python"]


@cache
def make_results_in_python() -> torch.library.Library:
    """Have this process do so from now on, for tensors on the CPU.

    Returns:
        What holds the replacements, for as long as the process lives.
    """
    library = torch.library.Library("_c10d_functional", "IMPL")
    for name, replacement in _REPLACEMENTS.items():
        library.impl(name, _on_real_numbers(replacement), "CPU")
    return library


def _on_real_numbers(replacement: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Gloo knows no complex numbers; torch gives it pairs of real ones."""

    def call(value: Tensor, *args: Any) -> Tensor:
        if not value.is_complex():
            return replacement(value, *args)
        return torch.view_as_complex(replacement(torch.view_as_real(value), *args))

    return call


def _all_gather(value: Tensor, size: int, group: Any) -> Tensor:
    rows, *others = value.shape or (1,)
    out = value.new_empty((size * rows, *others))
    gather: Callable[..., Tensor] = torch.ops._c10d_functional.all_gather_into_tensor_out
    return gather(value, size, group, out=out)


def _reduce_scatter(value: Tensor, op: str, size: int, group: Any) -> Tensor:
    out = value.new_empty((value.shape[0] // size, *value.shape[1:]))
    scatter: Callable[..., Tensor] = torch.ops._c10d_functional.reduce_scatter_tensor_out
    return scatter(value, op, size, group, out=out)


def _all_reduce(value: Tensor, op: str, group: Any) -> Tensor:
    reduce: Callable[..., Tensor] = torch.ops._c10d_functional.all_reduce_
    return reduce(value.clone(memory_format=torch.contiguous_format), op, group)


def _broadcast(value: Tensor, source: int, group: Any) -> Tensor:
    send: Callable[..., Tensor] = torch.ops._c10d_functional.broadcast_
    return send(value.clone(memory_format=torch.contiguous_format), source, group)


def _all_to_all(value: Tensor, received: Sequence[int], sent: Sequence[int], group: Any) -> Tensor:
    out = value.new_empty((sum(received), *value.shape[1:]))
    resolve: Callable[[Any], Any] = _resolve_process_group
    known = resolve(group) if isinstance(group, str) else group
    work = dist.all_to_all_single(
        out, value.contiguous(), list(received), list(sent), group=known, async_op=True
    )
    _register_work(out, work)
    return out


_REPLACEMENTS: dict[str, Callable[..., Tensor]] = {
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_to_all_single": _all_to_all,
}
