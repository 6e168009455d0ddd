"""What measured transfers say: below which size of a chunk packing pays. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass, field

MARGIN = 0.95
"""Packing takes memory on both sides, so it has to win by a twentieth."""


@dataclass(frozen=True)
class Timing:
    """Seconds of a training step per parameter, for one size of chunks."""

    chunk_bytes: int
    packed: float
    direct: float
    coalesced: float | None = None

    @property
    def separate(self) -> float:
        """The better of the ways that give a parameter a transfer of its own."""
        return self.direct if self.coalesced is None else min(self.direct, self.coalesced)


@dataclass(frozen=True)
class BreakEven:
    """Where packing stops to pay on one kind of transport with so many ranks."""

    transport: str
    world_size: int
    staging_bytes: int
    """Chunks below this many bytes are packed."""
    coalesces: bool
    """Whether the others are one launch."""
    timings: tuple[Timing, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, transport: str, world_size: int, timings: tuple[Timing, ...]) -> BreakEven:
        """What ``timings``, by rising size, say: packed up to the last size at which it won."""
        packed = [t.chunk_bytes for t in timings if t.packed < MARGIN * t.separate]
        threshold = 2 * max(packed, default=0)  # half way to the next size, which is four times it
        weights = [t for t in timings if t.chunk_bytes >= threshold and t.coalesced is not None]
        gained = sum(t.direct - (t.coalesced or t.direct) for t in weights)
        return cls(transport, world_size, threshold, gained > 0, timings)
