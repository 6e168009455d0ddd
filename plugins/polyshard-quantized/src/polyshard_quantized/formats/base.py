"""What every wire format has: a scale for each block, a code for each value, and their arithmetic.

Every format is symmetric: a block is one ``float32`` scale and a code per value, and a value is
``code * scale``. Blocks run along a row of a parameter and never cross a row, so where a parameter
is cut into shards changes nothing.

[Note: exact scales]
A scale keeps 17 significant bits, so the product with a code of at most 7 bits is exact in
``float32``: decoding rounds nothing, sums of decoded values depend on their order alone, and
encoding what was decoded gives bitwise the same codes and scales.

[Note: not finite]
A block with an infinite value or a NaN gets a scale that is not finite, and every code times such a
scale is not finite either: 0 x inf is a NaN. So overflow stays visible on every rank, whatever a
device makes of casting such values to a code. No format may hide a scale.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Protocol

from torch import Tensor

from polyshard.errors import SettingError
from polyshard_quantized.workspace import Workspace

SCALE_BYTES = 4
"""A scale is a ``float32``."""

LARGEST_BLOCK = 1 << 16
"""In elements. Beyond it a block saves nothing and one large value spoils many small ones."""


class KernelCodes(IntEnum):
    """The codes that the kernels of :mod:`polyshard_quantized.arithmetic.kernels` can write."""

    INT8 = 0
    E4M3 = 1
    INT4_HALVES = 2
    """Two halves of a block share bytes: see :class:`.int4.Int4Coder`."""


class Coder(Protocol):
    """The arithmetic of one format on arrays of equal blocks."""

    def store(self, values: Tensor, codes: Tensor) -> None:
        """Write ``values`` (``[..., block]``, ``float32``, in units of the scale) as codes.

        Integer formats are given whole numbers within their range. ``codes`` is ``[..., nbytes]``
        ``uint8``; ``values`` may be overwritten.
        """
        ...

    def load(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Fill ``out`` (``[..., block]``, ``float32``) with code times scale (``[..., 1]``)."""
        ...


@dataclass(frozen=True)
class BlockFormat(ABC):
    """Base of the formats; ``block_elements`` is the largest number of values under one scale.

    Raises:
        SettingError: for a block that is no whole number between 8 and 65536.
    """

    block_elements: int = 256
    name: ClassVar[str]
    """What command lines and tables call the format."""
    largest_code: ClassVar[float]
    """Largest magnitude a code stands for; a block's scale is its largest value over this."""
    bits: ClassVar[int]
    """Width of a code."""
    is_integer: ClassVar[bool] = True
    """Whether codes are whole numbers, which may be rounded at random."""
    error_bound: ClassVar[float]
    """The error of a value is at most this times the largest magnitude of its block, and 2^-16 of
    that for the truncated scale."""
    needs_feedback: ClassVar[bool] = False
    """Whether gradients should have :class:`polyshard_quantized.ErrorFeedback` beside them."""
    kernel_codes: ClassVar[KernelCodes | None] = None
    """What the kernels of an accelerator write for it; without, tensor operations serve there."""

    def __post_init__(self) -> None:
        """Refuse blocks that make no sense."""
        size: object = self.block_elements
        if isinstance(size, bool) or not isinstance(size, int) or not 8 <= size <= LARGEST_BLOCK:
            raise SettingError(
                f"{type(self).__name__}: block_elements must be a whole number from 8 to "
                f"{LARGEST_BLOCK}, got {size!r}; 256 suits most models."
            )

    def code_bytes(self, elements: int) -> int:
        """Bytes of the codes of ``elements`` values that share a block."""
        return -(-elements * self.bits // 8)

    @abstractmethod
    def coder(self, workspace: Workspace) -> Coder:
        """The arithmetic; scratch memory comes from ``workspace``."""
