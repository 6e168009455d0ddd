"""Replica groups (``examples/replicas``) that a launcher starts: what they need and come to."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launch_ranks import FOLDER, wait_until

from polyshard_testing.hosts import Host

REPLICAS = FOLDER.parent / "replicas"
SCRIPT = REPLICAS / "train.py"
GROUPS = 2
PAUSE = "--pause=0.1"
PORT = 29510
STEPS_AFTER = 20
"""That groups make when all of them have come back."""

needs_torchft = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None, reason="torchft not installed (for Python 3.11)"
)


@dataclass(frozen=True)
class Groups:
    """What groups have written to the folder of a run."""

    out: Path

    def events(self, group: int) -> list[dict[str, Any]]:
        """Of one group, so far."""
        path = self.out / f"group-{group}.jsonl"
        text = path.read_text("utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1].splitlines()
        # A rank that is killed may leave half a line.
        return [json.loads(line) for line in whole if line[:1] == "{" and line[-1:] == "}"]

    def steps(self, group: int, since: float = 0.0, alone: bool = False) -> list[dict[str, Any]]:
        """That one group has committed after a moment; ``alone``: without the others."""
        return [
            event
            for event in self.events(group)
            if event.get("committed") and event["time"] > since
            if event["groups"] == 1 or not alone
        ]

    def wait(self, since: float = 0.0) -> None:
        """Until every group has made a step together with the others after a moment."""

        def are_there() -> bool:
            return all(
                any(step["groups"] == GROUPS for step in self.steps(group, since))
                for group in range(GROUPS)
            )

        wait_until(are_there, "steps of all groups together")

    def recovery(self, killed: int, since: float) -> str:
        """Seconds from a kill to the next step of the other group, and of the killed one."""
        other = self.steps(1 - killed, since)[0]["time"] - since
        again = self.steps(killed, since)[0]["time"] - since
        return f"the other group steps after {other:.1f} s, the killed one after {again:.1f} s"

    def finish(self) -> int:
        """Let the run end soon; the number of its steps."""
        last = max(step["number"] for group in range(GROUPS) for step in self.steps(group))
        (self.out / "stop").write_text(str(last + STEPS_AFTER), encoding="utf-8")
        return int(last + STEPS_AFTER)

    def compare(self, steps: int, out: Path) -> None:
        """With a run without kills, started by hand: every loss, and the last bits."""
        sys.path.insert(0, str(REPLICAS))  # of the processes that it starts, too
        try:
            from kills import Plan, undisturbed

            finals, losses = undisturbed(out, Plan(), steps)
        finally:
            sys.path.remove(str(REPLICAS))
        found: dict[int, set[str]] = {}
        for step in (step for group in range(GROUPS) for step in self.steps(group)):
            found.setdefault(step["number"], set()).add(step["loss"])
        assert found == losses
        for group in range(GROUPS):
            assert json.loads((self.out / f"final-{group}.json").read_text("utf-8")) == finals


@contextmanager
def lighthouse(host: Host) -> Iterator[str]:
    """torchft's, on a host that stays up; where it is. A silent group is not waited for long."""
    command = [
        *(*host.prefix, str(Path(sys.executable).with_name("torchft_lighthouse"))),
        *("--min_replicas=1", "--join_timeout_ms=200", "--quorum_tick_ms=20"),
        *("--heartbeat_timeout_ms=2000", f"--bind=[::]:{PORT}"),
    ]
    process = subprocess.Popen(command, env={**os.environ, "RUST_LOG": "error"})
    try:
        yield f"http://{host.address}:{PORT}"
    finally:
        process.kill()
        process.wait()
