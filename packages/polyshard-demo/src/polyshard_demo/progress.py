"""What the person in front of the run sees: the plan, then live progress or plain lines."""

import time
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from polyshard_demo.history import Evaluation, Step

__all__ = ["Display"]

MIB = 1 << 20


class Display:
    """Progress of one run on rank 0; on other ranks it stays silent.

    On a terminal there is one live line; elsewhere a plain line every `every` steps, which logs
    and pipes can take.
    """

    def __init__(self, first: int, steps: int, every: int, *, silent: bool) -> None:
        self.console = Console(quiet=silent, soft_wrap=True, highlight=False)
        self.first = first
        self.steps = steps
        self.every = every
        self._live = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=silent or not self.console.is_terminal,
        )
        self._task = self._live.add_task("", total=steps, completed=first, now="")

    def __enter__(self) -> Self:
        self._live.start()
        self._begun = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """A line, or several, above the live one."""
        self.console.print(text, markup=False)

    def step(self, done: Step, resident_bytes: int) -> None:
        """A step is done; `resident_bytes` is this rank's peak memory."""
        now = f"loss {done.loss:.4f}  {done.speed:>8,.0f} tokens/s  {resident_bytes / MIB:,.0f} MiB"
        self._live.update(self._task, completed=done.step, now=now)
        due = done.step % self.every == 0 or done.step in (1, self.steps)
        if self._live.disable and due:
            self.say(f"step {done.step:>5}/{self.steps}  {now}  {self._left(done.step)}".rstrip())

    def _left(self, step: int) -> str:
        """How long the steps after ``step`` take, at the pace so far; empty after the last."""
        pace = (time.monotonic() - self._begun) / max(step - self.first, 1)
        seconds = round(pace * (self.steps - step))
        return f"{timedelta(seconds=seconds)} left" if seconds else ""

    def evaluation(self, done: Evaluation, entropy: float) -> None:
        """The held-out loss is known; `entropy` is what a model without context reaches."""
        self.say(
            f"held-out after step {done.step}: {done.loss:.4f} nats/byte "
            f"(unigram entropy {entropy:.4f})"
        )
