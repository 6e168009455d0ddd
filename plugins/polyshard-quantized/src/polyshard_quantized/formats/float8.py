"""``e4m3``: a floating-point number a byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from polyshard_quantized.formats.base import BlockFormat, Coder, KernelCodes
from polyshard_quantized.workspace import Workspace


@dataclass(frozen=True)
class Float8Block(BlockFormat):
    """``float8_e4m3fn``: 3 bits of mantissa each, so small values beside a large one survive."""

    name: ClassVar[str] = "e4m3"
    largest_code: ClassVar[float] = 448.0
    bits: ClassVar[int] = 8
    is_integer: ClassVar[bool] = False
    error_bound: ClassVar[float] = 1 / 16
    kernel_codes: ClassVar[KernelCodes | None] = KernelCodes.E4M3

    @override
    def coder(self, workspace: Workspace) -> Coder:
        return Float8Coder(workspace)


class Float8Coder(Coder):
    """``float8_e4m3fn``, read through ``float16``: torch converts it slowly on a CPU.

    The bits of an e4m3 number, moved to where ``float16`` keeps sign, exponent and mantissa, are
    that number divided by 256, exactly, subnormal ones included. The NaN code would read as 480,
    but stands only in blocks whose scale is not finite. See [Note: not finite].
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    @override
    def store(self, values: Tensor, codes: Tensor) -> None:
        codes.view(torch.float8_e4m3fn).copy_(values)

    @override
    def load(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        take = self._workspace.take
        bits = take("bits", codes.shape, torch.int16, codes.device)
        bits.copy_(codes.view(torch.int8))
        bits.mul_(128)  # << 7, which takes longer
        bits.bitwise_and_(~0x4000)  # the second copy of the sign
        out.copy_(bits.view(torch.float16))
        wide = take("wide scales", scales.shape, torch.float32, scales.device)
        out.mul_(torch.mul(scales, 256.0, out=wide))
