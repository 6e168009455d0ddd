"""Values to codes and back, a tile at a time, with ordinary tensor operations on either device.

The operations are those that were fastest in eager mode on a CPU: ``amax`` and ``amin`` apart
(``aminmax`` and ``abs().amax()`` take ten times as long), a copy that converts followed by a
product in place (``mul`` of ``int8`` and ``float32`` takes seven times as long), no allocation.

[Note: not finite]
A block with an infinite value or a NaN gets a scale that is not finite, and every code times such a
scale is not finite either: 0 x inf is a NaN. So overflow stays visible on every rank, whatever a
device makes of casting such values to a code. Nothing here may hide a scale.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from polyshard_quantized.accelerator import kernels_for
from polyshard_quantized.formats import BlockFormat, Float8Block, Int4Block
from polyshard_quantized.workspace import Workspace

TINY = torch.finfo(torch.float32).tiny
_SCALE_MASK = ~0x7F  # 17 significant bits: see [Note: exact scales]


class Coder(Protocol):
    """The arithmetic of one format on arrays of equal blocks."""

    is_integer: bool
    """Whether codes are whole numbers, which may be rounded at random."""

    def store(self, values: Tensor, codes: Tensor) -> None:
        """Write ``values`` (``[..., block]``, ``float32``, in units of the scale) as codes.

        Integer formats expect whole numbers within their range. ``codes`` is ``[..., nbytes]``
        ``uint8``; ``values`` may be overwritten.
        """
        ...

    def load(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Fill ``out`` (``[..., block]``, ``float32``) with code times scale (``[..., 1]``)."""
        ...


class Int8Coder:
    """One ``int8`` a value."""

    is_integer = True

    def store(self, values: Tensor, codes: Tensor) -> None:
        """Convert."""
        codes.view(torch.int8).copy_(values)

    def load(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Convert, then multiply in place."""
        out.copy_(codes.view(torch.int8))
        out.mul_(scales)


class Int4Coder:
    """Two values a byte: value ``i`` in the low half of byte ``i``, ``i + nbytes`` in the high one.

    Halves of a block rather than neighbours share bytes, so that nothing is read with a stride.
    """

    is_integer = True

    def __init__(self, workspace: Workspace) -> None:
        """Scratch for the halves comes from ``workspace``."""
        self._workspace = workspace

    def store(self, values: Tensor, codes: Tensor) -> None:
        """``(high + 8) * 16 + low + 8``, computed in ``float32``, exactly."""
        half = codes.shape[-1]
        low, high = values[..., :half], values[..., half:]
        low[..., : high.shape[-1]].add_(high, alpha=16)
        codes.copy_(low.add_(136.0))

    def load(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Split the halves, move them back around zero, and multiply."""
        half = codes.shape[-1]
        bits = self._workspace.take("nibbles", codes.shape, torch.uint8, codes.device)
        torch.bitwise_and(codes, 15, out=bits)
        out[..., :half].copy_(bits)
        torch.bitwise_right_shift(codes, 4, out=bits)
        out[..., half:].copy_(bits[..., : out.shape[-1] - half])
        out.sub_(8.0)
        out.mul_(scales)


class Float8Coder:
    """``float8_e4m3fn``, read through ``float16``: torch converts it slowly on a CPU.

    The bits of an e4m3 number, moved to where ``float16`` keeps sign, exponent and mantissa, are
    that number divided by 256, exactly, subnormal ones included. The NaN code would read as 480,
    but stands only in blocks whose scale is not finite. See [Note: not finite].
    """

    is_integer = False

    def __init__(self, workspace: Workspace) -> None:
        """Scratch for the bits comes from ``workspace``."""
        self._workspace = workspace

    def store(self, values: Tensor, codes: Tensor) -> None:
        """Convert, to nearest."""
        codes.view(torch.float8_e4m3fn).copy_(values)

    def load(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Move the bits, convert from ``float16``, and multiply by 256 scales."""
        take = self._workspace.take
        bits = take("bits", codes.shape, torch.int16, codes.device)
        bits.copy_(codes.view(torch.int8))
        bits.mul_(128)  # << 7, which takes longer
        bits.bitwise_and_(~0x4000)  # the second copy of the sign
        out.copy_(bits.view(torch.float16))
        wide = take("wide scales", scales.shape, torch.float32, scales.device)
        out.mul_(torch.mul(scales, 256.0, out=wide))


def coder_for(form: BlockFormat, workspace: Workspace) -> Coder:
    """The arithmetic of ``form``."""
    if isinstance(form, Float8Block):
        return Float8Coder(workspace)
    if isinstance(form, Int4Block):
        return Int4Coder(workspace)
    return Int8Coder()


class Rounding(Protocol):
    """How values in units of the scale become whole numbers, in place."""

    def round_(self, values: Tensor, largest: float) -> None:
        """Round ``values`` to whole numbers in ``[-largest, largest]``."""
        ...


class Nearest:
    """To the nearest whole number, ties to even."""

    def round_(self, values: Tensor, largest: float) -> None:
        """The largest value of a block is at most 1.00002 times the largest code: no clamp."""
        del largest
        values.round_()


class BlockCodec:
    """Encodes and decodes arrays of equal blocks."""

    def __init__(self, form: BlockFormat, workspace: Workspace, rounding: Rounding) -> None:
        """``rounding`` is unused by formats that are not of whole numbers."""
        self.coder = coder_for(form, workspace)
        self._format = form
        self._largest = form.largest_code
        self._has_kernels = isinstance(rounding, Nearest)
        self._workspace = workspace
        self._rounding = rounding

    def encode(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Write ``values`` (``[..., block]``, any floating dtype) as codes and scales.

        ``values`` are left as they are. ``scales`` is ``[..., 1]`` ``float32``.
        """
        if self._has_kernels and (kernels := kernels_for(values)) is not None:
            kernels.encode(self._format, values, codes, scales)
            return
        take = self._workspace.take
        quotients = take("quotients", values.shape, torch.float32, values.device)
        if values.dtype != torch.float32:
            values = quotients.copy_(values)
        torch.amax(values, -1, keepdim=True, out=scales)
        lowest = take("lowest", scales.shape, torch.float32, values.device)
        torch.amin(values, -1, keepdim=True, out=lowest)
        torch.maximum(scales, lowest.neg_(), out=scales)
        scales.div_(self._largest)
        scales.view(torch.int32).bitwise_and_(_SCALE_MASK)
        scales.clamp_min_(TINY)  # keeps a NaN
        torch.div(values, scales, out=quotients)
        if self.coder.is_integer:
            self._rounding.round_(quotients, self._largest)
        self.coder.store(quotients, codes)

    def decode(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Fill ``out`` (``[..., block]``, any floating dtype); cast once, from ``float32``."""
        if (kernels := kernels_for(out)) is not None:
            kernels.load(self._format, codes, scales, out)
        elif out.dtype == torch.float32:
            self.coder.load(codes, scales, out)
        else:
            wide = self._workspace.take("decoded", out.shape, torch.float32, out.device)
            self.coder.load(codes, scales, wide)
            out.copy_(wide)
