"""The demonstration under torchrun, and what its agents and ranks say when."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from polyshard_checkpoint import checkpoints_in
from polyshard_cli.main import app

# docs/how-to/several-hosts.md says why the store of agents is not shared with ranks.
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
EXAMPLES = Path(__file__).parents[4] / "examples"
SCRIPT = EXAMPLES / "train_lm.py"
POLL = 0.002
SPARE = 1
"""Restarts beyond what a test asks for: torch has been seen to abort a rank as its process ended,
when all was done ("terminate called without an active exception")."""

Undisturbed = Callable[..., Path]
"""The directory of a run of so many steps, ranks (2), and with further options."""


def training(out: Path, steps: int) -> list[str]:
    """Options of a training whose every step is printed, and every fifth saved."""
    size = ["--preset=tiny", f"--steps={steps}", "--batch=12", "--sequence=32", "--device=cpu"]
    often = ["--checkpoint-every=5", "--eval-every=0", "--log-every=1", "--no-page"]
    return [*size, *often, f"--out={out}", "--resume=auto"]


def losses(run: Path) -> list[float]:
    """Of every step of a run that has ended."""
    return [step["loss"] for step in json.loads((run / "report.json").read_text())["steps"]]


@dataclass(frozen=True)
class Line:
    """What was printed, and when (seconds of ``time.monotonic``)."""

    time: float
    text: str


@dataclass
class Agent:
    """One torchrun, with everything that it and its ranks have printed so far."""

    process: subprocess.Popen[str]
    lines: list[Line] = field(default_factory=list)

    def read(self) -> None:
        """Take down what is printed until the end."""
        assert self.process.stdout is not None
        for text in self.process.stdout:
            self.lines.append(Line(time.monotonic(), text.rstrip()))

    def ranks(self) -> list[int]:
        """Process ids of its ranks; those that have ended and were not noticed are among them."""
        pid = self.process.pid
        try:
            return [int(child) for child in _children(pid).split()]
        except FileNotFoundError:
            return []

    def first(self, pattern: str, since: float) -> Line | None:
        """The first line after ``since`` that has ``pattern`` in it."""
        found = (line for line in list(self.lines) if line.time > since)
        return next((line for line in found if re.search(pattern, line.text)), None)

    def said(self) -> str:
        """Everything, for people."""
        start = self.lines[0].time if self.lines else 0.0
        return "\n".join(f"{line.time - start:7.2f}  {line.text}" for line in list(self.lines))


def _children(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


@contextmanager
def agent(
    torchrun: Sequence[str],
    train: Sequence[str],
    prefix: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    script: Path = SCRIPT,
) -> Iterator[Agent]:
    """``torchrun`` with a training, started by ``prefix``; at the end it is killed if it runs.

    Args:
        torchrun: its options.
        train: those of the training.
        prefix: a command that runs another.
        environment: variables beside those of this process.
        script: the training.
    """
    launcher = [*prefix, sys.executable, "-m", "torch.distributed.run", *torchrun]
    variables = {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        **ENVIRONMENT,
        **(environment or {}),
    }
    process = subprocess.Popen(
        [*launcher, str(script), *train],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    started = Agent(process)
    reader = threading.Thread(target=started.read, daemon=True)
    reader.start()
    try:
        yield started
    finally:
        left = [process.pid, *started.ranks()]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.wait()
        reader.join(10)
        if process.stdout is not None and not reader.is_alive():
            process.stdout.close()


def undisturbed(train: Sequence[str], ranks: int) -> None:
    """A run on one host that nothing happens to; ranks have one thread, as those of agents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with pytest.raises(SystemExit, match=r"^0$"):
            app()(["train", *train, f"--ranks={ranks}"], prog_name="polyshard")


def wait_for(
    agents: Sequence[Agent], pattern: str, since: float = 0.0, seconds: float = 120
) -> Line:
    """The first line of any of ``agents`` after ``since`` with ``pattern`` in it.

    Raises:
        TimeoutError: with everything that was said.
        ChildProcessError: likewise, when all agents have ended without it.
    """
    deadline = time.monotonic() + seconds
    while True:
        ended = all(one.process.poll() is not None for one in agents)
        found = [line for one in agents if (line := one.first(pattern, since)) is not None]
        if found:
            return min(found, key=lambda line: line.time)
        said = "\n\n".join(one.said() for one in agents)
        if ended:
            raise ChildProcessError(f"they ended without '{pattern}':\n{said}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no '{pattern}' in {seconds} s:\n{said}")
        time.sleep(POLL)


def final_state(run: Path) -> dict[str, Tensor]:
    """Every tensor of weights and optimizer in a run's newest checkpoint, whole, by key."""
    newest = checkpoints_in(run / "checkpoints")[0]
    metadata = dcp.FileSystemReader(newest).read_metadata().state_dict_metadata
    wanted = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if key.startswith(("model.", "optimizer.")) and isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(wanted, checkpoint_id=newest, no_dist=True)
    return wanted
