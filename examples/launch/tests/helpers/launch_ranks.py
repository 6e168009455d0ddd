"""The training started by hand, and what it has come to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore

from polyshard_checkpoint import checkpoints_in

FOLDER = Path(__file__).parents[2]
SCRIPT = FOLDER / "train.py"
STEPS = 40
PAUSE = "--pause=0.15"
"""So that a run takes long enough for something to happen to it."""
TRY_AGAIN = 75
MISTAKE = 64


@dataclass(frozen=True)
class Outcome:
    """What a run that has ended left."""

    world_size: int
    losses: list[float]
    starts: list[tuple[int, int]]
    """Ranks, and the first step they made, of each start."""

    @classmethod
    def of(cls, out: Path) -> Outcome:
        """Read it."""
        done = json.loads((out / "losses.json").read_text("utf-8"))
        starts = [(start["ranks"], start["step"]) for start in done["starts"]]
        return cls(done["world_size"], done["losses"], starts)


Undisturbed = Callable[[int], Outcome]
"""What a run of so many ranks comes to, started by hand."""


def options(out: Path, *more: str) -> list[str]:
    """Of a training that takes long enough for something to happen to it."""
    return [f"--out={out}", f"--steps={STEPS}", PAUSE, *more]


def by_hand(
    ranks: int, out: Path, *more: str, meanwhile: Callable[[list[int]], None] | None = None
) -> list[int]:
    """Start so many local ranks and nothing else; their exit codes.

    Args:
        ranks: how many.
        out: the run's folder; what ranks print is in ``log`` there.
        more: options of the training.
        meanwhile: called with their process ids while they run.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 meets at the store too, and starts none
    }
    command = [sys.executable, str(SCRIPT), f"--out={out}", *more]
    with (out / "log").open("a") as log:
        processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank in range(ranks)
        ]
    try:
        if meanwhile is not None:
            meanwhile([process.pid for process in processes])
        return [process.wait(120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def wait_for_step(log: Path, step: int) -> None:
    """Wait until a log says that so many steps are done.

    Raises:
        TimeoutError: when it does not.
    """
    wait_until(lambda: log.exists() and f"step {step}/" in log.read_text(), f"step {step}")


def wait_for_checkpoint(out: Path, least: int = 1, seconds: float = 120) -> None:
    """Wait until the run has saved so many steps.

    Raises:
        TimeoutError: when it has not.
    """
    wait_until(lambda: newest(out) + 1 >= least, f"a checkpoint of {least} steps", seconds)


def newest(out: Path) -> int:
    """The step that was saved last; -1 where there is none."""
    found = checkpoints_in(out / "checkpoints")
    return max((int(path.name.partition("-")[2][:6]) for path in found), default=-1)


def wait_until(holds: Callable[[], object], what: str, seconds: float = 120) -> None:
    """Wait until something holds.

    Raises:
        TimeoutError: when it does not in time.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {seconds} s")
        time.sleep(0.05)


def ask(pids: Sequence[int], number: signal.Signals = signal.SIGUSR1) -> None:
    """Ask processes to leave."""
    for pid in pids:
        os.kill(pid, number)


def ranks_of(script: Path, pids: Sequence[int]) -> list[int]:
    """Those of the processes that are ranks of a training."""
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in pids}
    # `python SCRIPT`, or `python -u SCRIPT` under torchrun.
    return [pid for pid, name in names.items() if str(script).encode() in name[1:3]]
