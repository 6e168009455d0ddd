"""What a piece of work launches on a device, and what it copies, as the profiler sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

LAUNCHES = ("cudaLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cuLaunchKernel")
"""Calls of the runtime; cooperative and extended launches share these beginnings."""
COPY_OPERATORS = (
    "aten::copy_",
    "aten::_foreach_copy_",
    "aten::cat",
    "aten::_chunk_cat",
    "aten::split_with_sizes_copy",
)
COPY_KERNELS = ("memcpy", "copy", "catarray", "chunk_cat", "split_with_sizes")
"""Parts of the names of device kernels that move bytes and compute nothing."""


@dataclass(frozen=True)
class Counts:
    """Of one run. Device fields are ``None`` without CUDA.

    Attributes:
        copy_operators: Copying operators called, those inside other copying operators left out.
        launches: Kernels, copies and fills the host launched.
        copy_kernels: Device kernels and transfers that only copy.
        copy_seconds: Device time of these.
        device_seconds: Device time of everything.
    """

    copy_operators: int
    launches: int | None = None
    copy_kernels: int | None = None
    copy_seconds: float | None = None
    device_seconds: float | None = None


def count(work: Callable[[], object]) -> Counts:
    """Run ``work`` once under the profiler."""
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with profile(activities=activities) as profiler:
        work()
        if cuda:
            torch.cuda.synchronize()
    events = list(profiler.events() or [])
    operators = sum(1 for e in events if e.name in COPY_OPERATORS and not _inside_copy(e))
    if not cuda:
        return Counts(operators)
    launches = sum(1 for e in events if e.name.startswith(LAUNCHES))
    kernels = [e for e in events if e.device_type.name == "CUDA" and not e.is_user_annotation]
    copies = [k for k in kernels if any(word in k.name.lower() for word in COPY_KERNELS)]
    return Counts(
        operators,
        launches,
        len(copies),
        sum(k.time_range.elapsed_us() for k in copies) / 1e6,
        sum(k.time_range.elapsed_us() for k in kernels) / 1e6,
    )


def _inside_copy(event: object) -> bool:
    parent = getattr(event, "cpu_parent", None)
    return parent is not None and parent.name in COPY_OPERATORS
