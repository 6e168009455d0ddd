"""What the main thread of a rank waits for, without a transfer."""

from __future__ import annotations


class WaitsFor:
    """A transfer with a rank that does not end."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def peers(self) -> tuple[int, ...]:
        return (self.rank,)

    def place(self) -> tuple[int, str, int]:
        return self.rank, "wire:1", 1
