"""What the person in front of the run sees: the plan, then a line every few steps."""

import time
from datetime import timedelta

from rich.console import Console

from polyshard_demo.history import Evaluation, Step

__all__ = ["Display"]

MIB = 1 << 20


class Display:
    """Progress of one run on rank 0; on other ranks it stays silent."""

    def __init__(self, first: int, steps: int, every: int, *, silent: bool) -> None:
        """Begin after step ``first`` of ``steps``, with a line for each ``every``."""
        self._console = Console(quiet=silent, soft_wrap=True, highlight=False)
        self._first, self._steps, self._every = first, steps, every
        self._begun = time.monotonic()

    def say(self, text: str) -> None:
        """A line, or several."""
        self._console.print(text, markup=False)

    def step(self, done: Step, resident_bytes: int) -> None:
        """A step is done; `resident_bytes` is this rank's peak memory."""
        if done.step % self._every and done.step not in (1, self._steps):
            return
        now = f"loss {done.loss:.4f}  {done.speed:>8,.0f} tokens/s  {resident_bytes / MIB:,.0f} MiB"
        self.say(f"step {done.step:>5}/{self._steps}  {now}  {self._left(done.step)}".rstrip())

    def _left(self, step: int) -> str:
        """How long the steps after ``step`` take, at the pace so far; empty after the last."""
        pace = (time.monotonic() - self._begun) / max(step - self._first, 1)
        seconds = round(pace * (self._steps - step))
        return f"{timedelta(seconds=seconds)} left" if seconds else ""

    def evaluation(self, done: Evaluation, entropy: float) -> None:
        """The held-out loss is known; `entropy` is what a model without context reaches."""
        self.say(
            f"held-out after step {done.step}: {done.loss:.4f} nats/byte "
            f"(unigram entropy {entropy:.4f})"
        )
