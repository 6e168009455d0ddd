"""Reductions under way, and how their sums become means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyshard.exchange.presence import Told
from polyshard.memory.buffers import Buffer
from polyshard.plugins.validation import wordless
from polyshard.transport.base import Pending


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

    def source_of(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """What is sent of a gradient: its own memory, which is read only, or a copy."""
        source = gradient if gradient.dtype == dtype else gradient.to(dtype)
        if not source.is_contiguous():
            source = source.contiguous()
        if self.before == 1.0:
            return source
        # Autograd may have given this memory to another parameter too, or a user may hold it.
        return source.div(self.before) if source is gradient else source.div_(self.before)


@dataclass
class InFlight:
    """A reduction under way: what to wait for, and what to make of the result.

    ``sources`` keeps the gradients alive until they were sent, where the transfer itself does not.
    ``total`` is ``None`` where this rank has no gradient: it only hears whether others have any.
    """

    pending: Pending
    total: Tensor | None
    present: list[int]
    averaging: Averaging
    wire_dtype: torch.dtype
    told: Told | None
    """What ranks say of their gradients; ``None`` where they cannot differ."""
    sources: Sequence[Tensor | None] = field(default=(), repr=False)
    scratch: Buffer | None = None
    """Where staged gradients were packed; free once the transfer has ended."""
    sums_replicas: bool = False
    """Whether replicas are summed too, as settings said when it started."""
    is_summed: bool = False
    """Whether the sum over replicas is part of what :attr:`pending` waits for."""
    sent: Pending | None = None
    """The end of the reduce-scatter alone, where that may be waited for before the rest."""
    landing: Any = None
    """Gradients of it that land whole (a ``Descent``), if any do."""
    is_last: bool = True
    """Whether no backward of this iteration follows."""

    def let_go(self) -> bool:
        """Free what was sent; whether the sum over replicas goes on, to be finished later."""
        sent, self.sent = self.sent, None
        if sent is None or self.landing is not None:
            return False
        sent.wait()
        if self.scratch is not None:
            self.scratch.release()
        return True

    def end(self) -> None:
        """Wait, and let go of the result."""
        if self.told is not None:
            self.told.works.wait()
        self.pending.wait()
        if self.landing is not None:
            self.landing.wait()


@dataclass
class Decoding:
    """An exchange of payloads whose sum is decoded when they have arrived."""

    pending: Pending
    codec: Any
    received: Tensor
    outs: list[Tensor]
    scratch: Buffer
    give_back: Callable[[Buffer], None]

    def wait(self) -> None:
        """Wait for the payloads, and sum them."""
        self.pending.wait()
        wordless(self.codec.decode_sum(self.received, self.outs), self.codec, "decode_sum")
        self.give_back(self.scratch)
