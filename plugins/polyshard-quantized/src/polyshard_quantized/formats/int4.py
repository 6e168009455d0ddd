"""``int4``: two whole numbers a byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from polyshard_quantized.formats.base import BlockFormat, Coder, KernelCodes
from polyshard_quantized.workspace import Workspace


@dataclass(frozen=True)
class Int4Block(BlockFormat):
    """4-bit integers in [-7, 7], two a byte: lossy, and therefore never a default."""

    block_elements: int = 64
    name: ClassVar[str] = "int4"
    largest_code: ClassVar[float] = 7.0
    bits: ClassVar[int] = 4
    error_bound: ClassVar[float] = 1 / 14
    needs_feedback: ClassVar[bool] = True
    kernel_codes: ClassVar[KernelCodes | None] = KernelCodes.INT4_HALVES

    @override
    def coder(self, workspace: Workspace) -> Coder:
        return Int4Coder(workspace)


class Int4Coder(Coder):
    """Two values a byte: value ``i`` in the low half of byte ``i``, ``i + nbytes`` in the high one.

    Halves of a block rather than neighbours share bytes, so that nothing is read with a stride.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    @override
    def store(self, values: Tensor, codes: Tensor) -> None:
        # (high + 8) * 16 + low + 8, in float32, exactly.
        half = codes.shape[-1]
        low, high = values[..., :half], values[..., half:]
        low[..., : high.shape[-1]].add_(high, alpha=16)
        codes.copy_(low.add_(136.0))

    @override
    def load(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        half = codes.shape[-1]
        bits = self._workspace.take("nibbles", codes.shape, torch.uint8, codes.device)
        torch.bitwise_and(codes, 15, out=bits)
        out[..., :half].copy_(bits)
        torch.bitwise_right_shift(codes, 4, out=bits)
        out[..., half:].copy_(bits[..., : out.shape[-1] - half])
        out.sub_(8.0)
        out.mul_(scales)
