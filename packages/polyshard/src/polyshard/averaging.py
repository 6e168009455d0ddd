"""How sums become means."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Averaging:
    """How sums become means: divide every source by ``before``, the sum by ``after``."""

    before: float
    after: float

    @classmethod
    def of(cls, divisor: float, dtype: torch.dtype) -> Averaging:
        """Split ``divisor`` around the sum where the sum could overflow (fp16)."""
        if dtype is not torch.float16:
            return cls(1.0, divisor)
        before = 1.0
        while divisor % before == 0 and divisor / before > before:
            before *= 2
        return cls(before, divisor / before)
