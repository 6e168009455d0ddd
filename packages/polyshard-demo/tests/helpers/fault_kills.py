"""``kill -9`` of random ranks of a run at random moments, and how it gets over them."""

from __future__ import annotations

import math
import os
import random
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from fault_jobs import POLL, SPARE, Agent, Line, agent, wait_for

RANKS = 2
KILLS_PER_RUN = 10
STARTING_SECONDS = 4.0
"""About what a rank takes to its first step."""
SAVING_SECONDS = 0.04
"""About what an asynchronous save takes."""

STARTED = "^model .* parameters, engine"
STEPPED = r"^step +\d+/"


@dataclass(frozen=True)
class Kill:
    """One kill.

    Attributes:
        rank: who was killed.
        phase: what the run was at: ``starting``, ``training`` or ``saving``.
        at: when, in seconds of ``time.monotonic``.
    """

    rank: int
    phase: str
    at: float


@dataclass
class Record:
    """What a run went through."""

    kills: list[Kill] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """From each kill that was followed by a step before the next one, to that step."""
    lost: list[int] = field(default_factory=list)
    """How many steps were done a second time, likewise."""

    def add(self, other: Record) -> None:
        """Count another run's too."""
        self.kills += other.kills
        self.seconds += other.seconds
        self.lost += other.lost

    def summary(self) -> str:
        """For people."""
        phases = [kill.phase for kill in self.kills]
        counted = ", ".join(f"{phases.count(one)} {one}" for one in sorted(set(phases)))
        return (
            f"{len(phases)} kills ({counted}); seconds from a kill to the next step: median "
            f"{median(self.seconds):.1f}, most {max(self.seconds):.1f}; steps done again: median "
            f"{median(self.lost):.0f}, most {max(self.lost)}"
        )


def disturbed(train: Sequence[str], run: Path, source: random.Random, kills: int) -> Record:
    """A run to its end, with up to ``kills`` kills, and hardly more restarts than these.

    Args:
        train: options of the training.
        run: where it keeps its checkpoints.
        source: decides whom and when.
        kills: how often.
    """
    torchrun = ["--standalone", f"--nproc-per-node={RANKS}", f"--max-restarts={kills + SPARE}"]
    record = Record()
    with agent(torchrun, train) as started:
        before: list[int] = []
        while len(record.kills) < kills:
            ranks = _new_ranks(started, before)
            if not ranks or not _moment(started, source):
                break
            kill = _kill(started, ranks, run, source)
            if kill is not None:
                record.kills.append(kill)
                before = ranks
        code = started.process.wait(300)
        if code:
            raise ChildProcessError(f"exit code {code}:\n{started.said()}")
        _read(started, record)
    return record


def _new_ranks(started: Agent, before: Sequence[int]) -> list[int]:
    """The ranks, once all of them have been started again; none when the run is over."""
    deadline = time.monotonic() + 120
    while started.process.poll() is None:
        ranks = started.ranks()
        if len(ranks) == RANKS and not set(ranks) & set(before):
            return ranks
        if time.monotonic() > deadline:
            raise TimeoutError(f"no new ranks:\n{started.said()}")
        time.sleep(POLL)
    return []


def _moment(started: Agent, source: random.Random) -> bool:
    """Wait for one: any time after a start, or shortly after a save has begun."""
    if source.random() < 0.5:
        time.sleep(source.uniform(0, 1.25 * STARTING_SECONDS))
        return True
    with suppress(ChildProcessError):  # it has ended
        for _ in range(source.randint(1, 4)):
            wait_for([started], "^saving step", time.monotonic())
        time.sleep(source.uniform(0, SAVING_SECONDS))
        return True
    return False


def _kill(started: Agent, ranks: Sequence[int], run: Path, source: random.Random) -> Kill | None:
    rank = source.randrange(RANKS)
    saving = any(run.glob("checkpoints/.unfinished-*"))
    at = time.monotonic()
    try:
        os.kill(ranks[rank], signal.SIGKILL)
    except ProcessLookupError:
        return None  # the run was ending
    begun = max((line.time for line in _lines(started, STARTED)), default=0.0)
    stepped = [line for line in _lines(started, STEPPED) if begun <= line.time <= at]
    phase = "saving" if saving and stepped else "training" if stepped else "starting"
    return Kill(rank, phase, at)


def _lines(started: Agent, pattern: str) -> list[Line]:
    return [line for line in list(started.lines) if re.search(pattern, line.text)]


def _read(started: Agent, record: Record) -> None:
    """Find out from what was printed how each kill was got over."""
    found = _lines(started, STEPPED)
    steps = [(line.time, int(line.text.split()[1].partition("/")[0])) for line in found]
    ends = [*(kill.at for kill in record.kills[1:]), math.inf]
    for kill, end in zip(record.kills, ends, strict=False):
        after = [(time, step) for time, step in steps if kill.at < time < end]
        before = [step for time, step in steps if time <= kill.at]
        if after:
            record.seconds.append(after[0][0] - kill.at)
            record.lost.append(max(0, max(before, default=0) - after[0][1] + 1))
