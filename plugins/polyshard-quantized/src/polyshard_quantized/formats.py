"""What a block of values looks like on the wire.

Every format is symmetric: a block is one ``float32`` scale and a code per value, and a value is
``code * scale``. Blocks run along a row of a parameter and never cross a row, so where a parameter
is cut into shards changes nothing.

[Note: exact scales]
A scale keeps 17 significant bits, so the product with a code of at most 7 bits is exact in
``float32``: decoding rounds nothing, sums of decoded values depend on their order alone, and
encoding what was decoded gives the same codes and scales to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from polyshard.errors import SettingError

SCALE_BYTES = 4
"""A scale is a ``float32``."""

LARGEST_BLOCK = 1 << 16
"""In elements. Beyond it a block saves nothing and one large value spoils many small ones."""


@dataclass(frozen=True)
class BlockFormat:
    """Base of the formats; ``block_elements`` is the largest number of values under one scale.

    Raises:
        SettingError: for a block that is no whole number between 8 and 65536.
    """

    block_elements: int = 256
    largest_code: ClassVar[float]
    """Largest magnitude a code stands for; a block's scale is its largest value over this."""
    bits: ClassVar[int]
    """Bits of a code."""

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


@dataclass(frozen=True)
class Int8Block(BlockFormat):
    """8-bit integers in [-127, 127]: the default, about four times as accurate as e4m3.

    The error of a value is at most half its block's scale.
    """

    largest_code: ClassVar[float] = 127.0
    bits: ClassVar[int] = 8


@dataclass(frozen=True)
class Float8Block(BlockFormat):
    """``float8_e4m3fn``: 3 bits of mantissa each, so small values beside a large one survive."""

    largest_code: ClassVar[float] = 448.0
    bits: ClassVar[int] = 8


@dataclass(frozen=True)
class Int4Block(BlockFormat):
    """4-bit integers in [-7, 7], two a byte: lossy, and therefore never a default."""

    block_elements: int = 64
    largest_code: ClassVar[float] = 7.0
    bits: ClassVar[int] = 4
