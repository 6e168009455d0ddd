"""Which step, turn and slot it is: what reductions and random numbers go by."""

from __future__ import annotations

from dataclasses import dataclass

from polyshard_reproducible.shares import Shares


@dataclass(frozen=True)
class Moment:
    """One turn of a step. ``run`` is the same object in all turns of one attempt at it."""

    run: object
    step: int
    turn: int
    turns: int
    shares: Shares | None = None
    """Replica groups that have the other slots of the step, if any have."""

    @property
    def is_first(self) -> bool:
        """Whether nothing of this step was summed yet."""
        return self.turn == 0

    @property
    def is_last(self) -> bool:
        """Whether the sums of this step are whole after it."""
        return self.turn == self.turns - 1


@dataclass
class Clock:
    """What time it is for everything that one plugin object serves; ``None`` between steps."""

    now: Moment | None = None


class Watcher:
    """Is told what happens within the steps of a model; this base does nothing."""

    def on_step(self, step: int) -> None:
        """A step begins: parameters are what it computes with."""

    def on_slot(self, slot: int) -> None:
        """Forward and backward of a slot come now."""

    def on_sums(self) -> None:
        """All slots were run, and gradients are whole; they are unchanged since."""

    def on_pause(self) -> None:
        """What is computed from now on belongs to no slot, also when one of them failed."""


NOBODY = Watcher()
