"""Replica groups that are killed at random and started anew; then what came of it.

    python examples/replicas/kills.py --out runs/kills --kills 50

Two groups of two ranks train (``train.py``); the lighthouse is in this process. A kill is SIGKILL
to one rank, or to both, of a group whose other group has made a step by itself; one in four comes
while the group is still starting or healing. This process does what an elastic agent does: when a
rank is gone it ends the rest of its group, and starts all of it with a new store. At the end a run
of as many steps, without kills, says what weights, optimizer state and losses must be.

With ``--warm`` ranks are forked from a process that has imported torch, as a standby would be;
otherwise each is a new interpreter.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import time
import traceback
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from train import Settings, leave

TRAIN, PEER = "train", "fsdp2"
GROUPS, RANKS = 2, 2
HEARTBEAT_SECONDS = 2.0
"""A group that is silent for longer is not waited for."""
POLL_SECONDS = 0.01
WAIT_SECONDS = 120.0
"""For what must happen; machines may be busy."""
STEPS_AFTER = 20
"""The last kill, at least."""


def run_rank(script: str, settings: Settings, environment: dict[str, str], log: Path) -> None:
    """What one rank does, in a process of its own."""
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    try:
        importlib.import_module(script).train(settings)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    leave()


@dataclass
class Group:
    """One replica group: its ranks, and what it has written."""

    number: int
    out: Path
    lighthouse: str
    script: str
    steps: int
    pause: float
    processes: Any
    started: list[float] = field(default_factory=list)
    ranks: list[Any] = field(default_factory=list)
    _store: TCPStore | None = None
    _read: int = 0
    _events: list[dict[str, Any]] = field(default_factory=list)

    def start(self) -> None:
        """All ranks, which meet at a new store."""
        self._store = TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False)
        common = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHFT_LIGHTHOUSE": self.lighthouse,
            "WORLD_SIZE": str(RANKS),
        }
        seed = len(self.started)  # a replacement begins with other weights
        settings = Settings(self.out, self.number, self.steps, self.pause, seed)
        self.started.append(time.time())
        self.ranks = []
        for rank in range(RANKS):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            log = self.out / f"rank-{self.number}-{rank}.log"
            given = (self.script, settings, environment, log)
            self.ranks.append(self.processes.Process(target=run_rank, args=given))
            self.ranks[-1].start()

    def end(self) -> None:
        """Whatever is left of it."""
        for rank in self.ranks:
            rank.kill()
            rank.join()

    @property
    def is_broken(self) -> bool:
        """Whether a rank is gone before it was done."""
        return any(rank.exitcode not in (None, 0) for rank in self.ranks)

    @property
    def is_done(self) -> bool:
        """Whether all ranks have ended well."""
        return all(rank.exitcode == 0 for rank in self.ranks)

    @property
    def events(self) -> list[dict[str, Any]]:
        """What it has written so far."""
        path = self.out / f"group-{self.number}.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read)
                lines = file.read()
            whole = lines[: lines.rfind(b"\n") + 1]
            self._read += len(whole)
            self._events += [json.loads(line) for line in whole.splitlines() if line[:1] == b"{"]
        return self._events

    @property
    def is_training(self) -> bool:
        """Whether it has made a step since it was started."""
        last = self.events[-1] if self.events else {"time": 0.0}
        return bool(last.get("committed")) and last["time"] > self.started[-1]


@dataclass(frozen=True)
class Kill:
    """What was killed when; ranks of one group."""

    group: int
    ranks: tuple[int, ...]
    time: float
    was_training: bool


@dataclass(frozen=True)
class Tally:
    """What came of a run.

    Attributes:
        kills: SIGKILL to one rank or all ranks of a group.
        kills_of_one_rank: of these, to one.
        kills_while_starting: of these, before the group had made a step.
        steps: of the run.
        starts: replacements that made a step.
        seconds_to_first_step: from the start of such a process to its first committed step:
            median and most.
        seconds_without_a_step: of the group that was left, from the kill on: median and most.
        steps_lost: by the group that was left, to one kill, at most.
        steps_alone: steps that one group made alone.
        same_losses: whether every loss has the bits of the run without kills.
        same_weights: whether weights and optimizer state of all groups have.
    """

    kills: int
    kills_of_one_rank: int
    kills_while_starting: int
    steps: int
    starts: int
    seconds_to_first_step: tuple[float, float]
    seconds_without_a_step: tuple[float, float]
    steps_lost: int
    steps_alone: int
    same_losses: bool
    same_weights: bool


@dataclass(frozen=True)
class Plan:
    """What is to be done.

    Attributes:
        kills: how many.
        seed: of their moments.
        script: which training.
        is_warm: whether ranks are forked.
        pause: seconds that each step of the run with kills waits.
    """

    kills: int = 50
    seed: int = 0
    script: str = TRAIN
    is_warm: bool = False
    pause: float = 0.05


class Run:
    """Groups under one lighthouse."""

    def __init__(self, out: Path, plan: Plan, steps: int) -> None:
        from torchft.coordination import LighthouseServer

        out.mkdir(parents=True, exist_ok=True)
        self.out = out
        self._lighthouse = LighthouseServer(
            bind="[::]:0",
            min_replicas=1,
            join_timeout_ms=200,
            quorum_tick_ms=20,
            heartbeat_timeout_ms=int(1000 * HEARTBEAT_SECONDS),
        )
        address = self._lighthouse.address()
        processes = multiprocessing.get_context("forkserver" if plan.is_warm else "spawn")
        if plan.is_warm:
            processes.set_forkserver_preload([plan.script, "torchft"])
        self.groups = [
            Group(
                number, out, address, plan.script,
                steps, 0.0 if steps else plan.pause, processes,
            )
            for number in range(GROUPS)
        ]  # fmt: skip
        for group in self.groups:
            group.start()

    def wait(self, is_there: Any, seconds: float = WAIT_SECONDS) -> None:
        """Until ``is_there()``; ranks that end too early are an error.

        Raises:
            TimeoutError: with the end of each rank's log.
        """
        until = time.monotonic() + seconds
        while not is_there():
            self._restart()
            if time.monotonic() > until:
                raise TimeoutError("\n\n".join(self._logs()))
            time.sleep(POLL_SECONDS)

    def sleep(self, seconds: float) -> None:
        """Do what an agent does for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._restart()
            time.sleep(POLL_SECONDS)

    def _restart(self) -> None:
        for group in self.groups:
            if group.is_broken:
                group.end()
                group.start()

    def _logs(self) -> list[str]:
        return [f"{p.name}: {p.read_text('utf-8')[-3000:]}" for p in self.out.glob("rank-*.log")]

    def close(self) -> None:
        """End everything."""
        for group in self.groups:
            group.end()
        self._lighthouse.shutdown()


def undisturbed(out: Path, plan: Plan, steps: int) -> tuple[dict[str, str], dict[int, set[str]]]:
    """Digests and losses of a run without kills."""
    run = Run(out, plan, steps)
    try:
        run.wait(lambda: all(group.is_done for group in run.groups), WAIT_SECONDS + 5 * steps)
        starts = [len(group.started) for group in run.groups]
        assert starts == [1] * GROUPS, "a rank ended by itself"
        finals = [final_of(group) for group in run.groups]
    finally:
        run.close()
    assert finals[0] == finals[1]
    return finals[0], losses_of(run)


def losses_of(run: Run) -> dict[int, set[str]]:
    """Of each step that was committed: one, where all groups have the same."""
    found: dict[int, set[str]] = {}
    for event in (event for group in run.groups for event in group.events):
        if event.get("committed"):
            found.setdefault(event["number"], set()).add(event["loss"])
    return found


def final_of(group: Group) -> dict[str, str]:
    """Digests at the end."""
    found: dict[str, str] = json.loads(
        (group.out / f"final-{group.number}.json").read_text("utf-8")
    )
    return found


def disturbed(out: Path, plan: Plan) -> tuple[Run, list[Kill]]:
    """A run with so many kills, which has ended well."""
    draw = random.Random(plan.seed)
    run = Run(out, plan, 0)
    kills: list[Kill] = []
    try:
        run.wait(lambda: all(group.is_training for group in run.groups))
        while len(kills) < plan.kills:
            victim = draw.choice(run.groups)
            other = run.groups[1 - victim.number]
            if draw.random() < 0.25:  # perhaps in the middle of its start, or of healing
                run.sleep(draw.uniform(0.0, 4.0))
            else:
                run.wait(lambda victim=victim: victim.is_training)
                run.sleep(draw.uniform(0.0, 2.0))
            run.wait(lambda other=other: other.is_training)
            ranks = draw.choice([(0,), (1,), (0, 1)])
            kills.append(Kill(victim.number, ranks, time.time(), victim.is_training))
            for rank in ranks:
                os.kill(victim.ranks[rank].pid, signal.SIGKILL)
            run.wait(
                lambda victim=victim: victim.is_broken or victim.started[-1] > kills[-1].time, 5
            )
        run.wait(lambda: all(group.is_training for group in run.groups))
        last = max(event.get("number", 0) for group in run.groups for event in group.events)
        (out / "stop").write_text(str(last + STEPS_AFTER), encoding="utf-8")
        run.wait(lambda: all(group.is_done for group in run.groups), 3 * WAIT_SECONDS)
    finally:
        run.close()
    return run, kills


def tally(
    run: Run, kills: list[Kill], expected: dict[str, str], losses: dict[int, set[str]]
) -> Tally:
    """What came of it."""
    first_steps, gaps, lost = [], [], []
    for group in run.groups:
        steps = [e for e in group.events if e["event"] == "step" and e["committed"]]
        for start, until in pairwise([*group.started[1:], float("inf")]):
            made = [e["time"] - start for e in steps if start < e["time"] < until]
            first_steps += made[:1]
    for kill, until in zip(kills, [*(k.time for k in kills[1:]), float("inf")], strict=True):
        events = run.groups[1 - kill.group].events
        after = [e for e in events if e["event"] == "step" and kill.time < e["time"] < until]
        lost.append(sum(not e["committed"] for e in after))
        gaps += [e["time"] - kill.time for e in after if e["committed"]][:1]
    return Tally(
        kills=len(kills),
        kills_of_one_rank=sum(len(kill.ranks) == 1 for kill in kills),
        kills_while_starting=sum(not kill.was_training for kill in kills),
        steps=len(losses),
        starts=len(first_steps),
        seconds_to_first_step=middle_and_most(first_steps),
        seconds_without_a_step=middle_and_most(gaps),
        steps_lost=max(lost),
        steps_alone=sum(
            e["committed"] and e["groups"] == 1
            for group in run.groups
            for e in group.events
            if e["event"] == "step"
        ),
        same_losses=losses_of(run) == losses,
        same_weights=all(final_of(group) == expected for group in run.groups),
    )


def middle_and_most(values: list[float]) -> tuple[float, float]:
    """Rounded to hundredths."""
    return round(statistics.median(values), 2), round(max(values), 2)


def measure(out: Path, plan: Plan) -> Tally:
    """Kill so often, and compare with a run without kills."""
    os.environ["OMP_NUM_THREADS"] = "1"  # ranks share the cores
    run, kills = disturbed(out / "killed", plan)
    steps = int((out / "killed" / "stop").read_text("utf-8"))
    return tally(run, kills, *undisturbed(out / "undisturbed", plan, steps))


def main() -> None:
    """Read the command line, and print the tally."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm", action="store_true", help="fork ranks instead of starting Python")
    parser.add_argument("--peer", action="store_true", help="torch's FSDP2 in place of polyshard")
    given = parser.parse_args()
    plan = Plan(given.kills, given.seed, PEER if given.peer else TRAIN, given.warm)
    print(json.dumps(asdict(measure(given.out, plan)), indent=1))


if __name__ == "__main__":
    main()
