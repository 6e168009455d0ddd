"""``int8``: one whole number a byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from polyshard_quantized.formats.base import BlockFormat, Coder, KernelCodes
from polyshard_quantized.workspace import Workspace


@dataclass(frozen=True)
class Int8Block(BlockFormat):
    """8-bit integers in [-127, 127]: the default, about four times as accurate as e4m3.

    The error of a value is at most half its block's scale.
    """

    name: ClassVar[str] = "int8"
    largest_code: ClassVar[float] = 127.0
    bits: ClassVar[int] = 8
    error_bound: ClassVar[float] = 1 / 254
    kernel_codes: ClassVar[KernelCodes | None] = KernelCodes.INT8

    @override
    def coder(self, workspace: Workspace) -> Coder:
        return Int8Coder()


class Int8Coder(Coder):
    """One ``int8`` a value."""

    @override
    def store(self, values: Tensor, codes: Tensor) -> None:
        codes.view(torch.int8).copy_(values)

    @override
    def load(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        # Converted first: `mul` of int8 and float32 takes seven times as long.
        out.copy_(codes.view(torch.int8))
        out.mul_(scales)
