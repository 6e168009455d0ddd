"""Values to codes and back, a tile at a time, with ordinary tensor operations on either device.

The operations are those that were fastest in eager mode on a CPU: ``amax`` and ``amin`` apart
(``aminmax`` and ``abs().amax()`` take ten times as long), and no allocation. What a code is and how
it is packed belongs to its format.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from polyshard_quantized.arithmetic.accelerator import kernels_for
from polyshard_quantized.formats.base import BlockFormat
from polyshard_quantized.workspace import Workspace

TINY = torch.finfo(torch.float32).tiny
_SCALE_MASK = ~0x7F  # 17 significant bits: see [Note: exact scales]


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
        self.coder = form.coder(workspace)
        self._format = form
        self._largest = form.largest_code
        self._loads = form.kernel_codes is not None
        self._encodes = self._loads and isinstance(rounding, Nearest)
        self._workspace = workspace
        self._rounding = rounding

    def encode(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Write ``values`` (``[..., block]``, any floating dtype) as codes and scales.

        ``values`` are left as they are. ``scales`` is ``[..., 1]`` ``float32``.
        """
        if self._encodes and (kernels := kernels_for(values)) is not None:
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
        if self._format.is_integer:
            self._rounding.round_(quotients, self._largest)
        self.coder.store(quotients, codes)

    def decode(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Fill ``out`` (``[..., block]``, any floating dtype); cast once, from ``float32``."""
        if self._loads and (kernels := kernels_for(out)) is not None:
            kernels.load(self._format, codes, scales, out)
        elif out.dtype == torch.float32:
            self.coder.load(codes, scales, out)
        else:
            wide = self._workspace.take("decoded", out.shape, torch.float32, out.device)
            self.coder.load(codes, scales, wide)
            out.copy_(wide)
