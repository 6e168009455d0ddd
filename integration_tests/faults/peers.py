"""The faults of the table on torch's own FSDP2, under torchrun alone and under torchft."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from fault_table import PEER_GROUPS, PEER_TIMEOUT_SECONDS, STRUCK
from faults.training import BEFORE, mark_in

RANKS = 2
"""Of a group."""
ENOUGH = 4
"""Steps after a fault: by then ranks have met."""
STEPS = BEFORE + ENOUGH
PATIENCE_SECONDS = 5 * PEER_TIMEOUT_SECONDS
"""From the fault on: torchrun takes 30 s to end a process that was stopped."""
POLL_SECONDS = 0.03
LIGHTHOUSE = {"min_replicas": 1, "quorum_tick_ms": 100, "join_timeout_ms": 10_000}
"""As torchft's README starts it."""


@dataclass
class Rank:
    """One process: what it has noted, and when it ended."""

    path: Path
    number: int
    pid: int
    events: list[dict[str, Any]] = field(default_factory=list)
    ended: float | None = None
    _read: int = 0

    @classmethod
    def of(cls, path: Path) -> Rank:
        """Named by its group, rank and process."""
        _, number, pid = path.stem.split("-")
        rank = cls(path, int(number), int(pid))
        rank.look()
        return rank

    def look(self) -> None:
        """Read on."""
        if self.ended is not None:
            return
        is_gone = _is_gone(self.pid)
        with self.path.open("rb") as file:
            file.seek(self._read)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self._read += len(whole)
        self.events += [json.loads(line) for line in whole.splitlines()]
        if is_gone:
            self.ended = time.monotonic()

    def event(self, name: str) -> dict[str, Any] | None:
        """The first of a name."""
        return next((each for each in self.events if each["event"] == name), None)

    def steps(self, since: float = 0.0) -> list[dict[str, Any]]:
        """That were made and kept."""
        return [e for e in self.events if e.get("lost") is False and e["time"] > since]


def _is_gone(pid: int) -> bool:
    """Whether a process, which is no child of this one, has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([pidfd], [], [], 0)
    os.close(pidfd)
    return bool(ended)


class Group:
    """What one torchrun starts; a group under torchft is started anew when it has failed."""

    def __init__(self, folder: Path, number: int, fault: str, environment: dict[str, str]) -> None:
        """``fault`` strikes the first start."""
        self.folder, self.number = folder, number
        self._environment = {**os.environ, **environment}
        self.starts: list[list[Rank]] = []
        self.start(fault)

    def start(self, fault: str) -> None:
        """All ranks, which meet at a new store."""
        self.starts.append([])
        self._known = {path.name for path in self.folder.glob(f"{self.number}-*.jsonl")}
        what = ["--nnodes=1", f"--nproc-per-node={RANKS}", "--max-restarts=0", "--standalone"]
        command = [sys.executable, "-m", "torch.distributed.run", *what, "-m", "faults.peer"]
        with (self.folder / f"torchrun-{self.number}.log").open("a") as log:
            self.torchrun = subprocess.Popen(
                [*command, str(self.folder), str(self.number), fault],
                env=self._environment,
                stdout=log,
                stderr=log,
            )

    @property
    def ranks(self) -> list[Rank]:
        """Of the last start."""
        return self.starts[-1]

    def look(self) -> None:
        """At its processes."""
        for path in self.folder.glob(f"{self.number}-*.jsonl"):
            if path.name not in self._known:
                self._known.add(path.name)
                self.ranks.append(Rank.of(path))
        for rank in self.ranks:
            rank.look()

    def first(self, number: int) -> Rank:
        """The rank of this number in the first start."""
        return next(rank for rank in self.starts[0] if rank.number == number)

    def is_signalled(self, rank: Rank) -> bool:
        """Whether torchrun ended it."""
        log = (self.folder / f"torchrun-{self.number}.log").read_text("utf-8")
        return f"Sending process {rank.pid} closing signal SIGTERM" in log

    def end(self) -> None:
        """Whatever is left."""
        self.look()
        self.torchrun.kill()
        self.torchrun.wait()
        for rank in self.ranks:
            if not _is_gone(rank.pid):
                os.kill(rank.pid, signal.SIGKILL)


@contextmanager
def lighthouse_of(launcher: str) -> Iterator[dict[str, str]]:
    """What is in the environment of all ranks, after torchft's lighthouse has been started."""
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    if launcher == "torchrun":
        yield environment
        return
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", **LIGHTHOUSE)
    yield {**environment, "TORCHFT_LIGHTHOUSE": lighthouse.address()}
    lighthouse.shutdown()


def run_peer(launcher: str, fault: str, folder: Path) -> dict[str, Any]:
    """What ranks see of a fault, and whether they continue."""
    is_alone = launcher == "torchrun"
    if is_alone:
        (folder / "stop").write_text(str(STEPS), "utf-8")
    with lighthouse_of(launcher) as environment:
        groups = [
            Group(folder, number, "none" if number else fault, environment)
            for number in range(1 if is_alone else PEER_GROUPS)
        ]
        try:
            _watch(groups)
            moment = moment_in(folder)
            found = {"beside": _seen(groups[0], groups[0].first(1 - STRUCK), moment)}
            return {**found, **(_alone(groups[0]) if is_alone else _in_groups(groups, moment))}
        finally:
            for group in groups:
                group.end()


def moment_in(folder: Path) -> float:
    """Of the fault; infinity before."""
    mark = mark_in(folder)
    text = mark.read_text("utf-8") if mark.exists() else ""
    return float(text or "inf")


def _watch(groups: list[Group]) -> None:
    """Until ranks have seen it all; meanwhile do what the starter of a group does."""
    until = time.monotonic() + PATIENCE_SECONDS
    is_alone = len(groups) == 1
    while not (_is_settled_alone(groups[0]) if is_alone else _is_settled(groups)):
        moment = moment_in(groups[0].folder)
        if time.monotonic() > (until if moment == math.inf else moment + PATIENCE_SECONDS):
            return
        time.sleep(POLL_SECONDS)
        for group in groups:
            group.look()
            if group.torchrun.poll() and not is_alone:
                group.start("none")


def _is_settled_alone(group: Group) -> bool:
    """Whether all is over, or the other rank has ended early."""
    is_early = any(
        rank.number != STRUCK and rank.ended is not None and not rank.event("done")
        for rank in group.ranks
    )
    return is_early or group.torchrun.poll() is not None


def _is_settled(groups: list[Group]) -> bool:
    """Whether all groups train, the struck one as it was or after a new start."""
    since = moment_in(groups[0].folder)
    return all(
        len(group.ranks) == RANKS and all(len(rank.steps(since)) >= ENOUGH for rank in group.ranks)
        for group in groups
    )


def _seen(group: Group, rank: Rank, moment: float) -> dict[str, Any]:
    """By one rank that was not struck."""
    if raised := rank.event("raised"):
        seconds = round(raised["time"] - moment, 1)
        return {"saw": raised["kind"], "text": raised["text"], "seconds": seconds}
    if rank.event("done") or (rank.ended is None and rank.steps(moment)):
        return {"saw": "nothing"}
    if rank.ended is None:
        return {"saw": "waits", "seconds": round(time.monotonic() - moment, 1)}
    saw = "SIGTERM" if group.is_signalled(rank) else "ended"
    return {"saw": saw, "seconds": round(rank.ended - moment, 1)}


def _alone(group: Group) -> dict[str, Any]:
    digests = {rank.number: rank.steps()[-1]["digest"] for rank in group.ranks if rank.steps()}
    return {"goes_on": all(rank.event("done") for rank in group.ranks), "digests": digests}


def _in_groups(groups: list[Group], moment: float) -> dict[str, Any]:
    """What the other group sees, and when the struck one makes steps again."""
    struck, other = groups
    again = [rank.steps()[0]["time"] for rank in struck.ranks if rank.steps() and struck.starts[1:]]
    back = min(again, default=math.inf)
    first = other.first(STRUCK)
    times = [step["time"] for step in first.steps()]
    gaps = [late - early for early, late in pairwise(times) if moment < late and early < back]
    digests: dict[tuple[int, int], set[str]] = {}
    for rank in (*struck.ranks, *other.ranks):
        for step in rank.steps(moment):
            digests.setdefault((rank.number, step["number"]), set()).add(step["digest"])
    return {
        "other": _seen(other, first, moment),
        "goes_on": len(other.starts) == 1 and len(first.steps(moment)) >= ENOUGH,
        "pause_seconds": round(max(gaps), 1) if gaps else None,
        "steps_lost": sum(e.get("lost", False) for e in first.events if moment < e["time"] < back),
        "is_restarted": len(struck.starts) > 1,
        "back_seconds": None if back == math.inf else round(back - moment, 1),
        "same_weights": all(len(found) == 1 for found in digests.values()),
    }
