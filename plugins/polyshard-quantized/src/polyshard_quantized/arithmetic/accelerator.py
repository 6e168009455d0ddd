"""When kernels of an accelerator do the work of the tensor operations in :mod:`.codec`."""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor

from polyshard_quantized.formats.base import BlockFormat

LARGEST_BLOCK = 8192
"""In elements: a program holds a block in registers, and larger ones would spill."""


class Kernels(Protocol):
    """What :mod:`polyshard_quantized.arithmetic.kernels` offers."""

    def encode(self, form: BlockFormat, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Write values as codes and scales, rounded to nearest."""
        ...

    def load(self, form: BlockFormat, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Fill ``out``, of any floating dtype, with code times scale."""
        ...


@functools.cache
def _triton_kernels() -> Kernels | None:
    try:
        # Here, because it imports Triton, which compiles on first use.
        from polyshard_quantized.arithmetic import kernels
    except ImportError:
        return None
    found: Kernels = kernels
    return found


def kernels_for(values: Tensor) -> Kernels | None:
    """Kernels for blocks ``[..., block]``; ``None`` where tensor operations serve.

    That is on every device but CUDA, without Triton, in ROCm builds (nothing was tried there), and
    for very large blocks.
    """
    if not values.is_cuda or torch.version.hip or values.shape[-1] > LARGEST_BLOCK:
        return None
    return _triton_kernels()
