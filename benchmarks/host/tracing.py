"""What a trace costs the host: a step of tiny layers without it, with it idle, and with it on.

    python -m benchmarks host.tracing --groups 40

One process, torch's fake process group (see cost.py): what is left is Python. The file is written
to a temporary folder. Spans alone are timed as well, in CPU time, which others disturb less.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import polyshard
from benchmarks.harness import Found, sharded
from benchmarks.host.cost import Size, build, median_seconds
from benchmarks.host.silent import silent_group
from polyshard_cli.trace import Trace

STEPS = 40


@dataclass(frozen=True)
class Case(Size, groups=4):
    """A model."""

    def measure(self) -> Found:
        """Microseconds a group and step, of CPU a span, and spans of a step."""
        with tempfile.TemporaryDirectory() as folder:
            with silent_group(self.ranks):
                trace = Trace(Path(folder, "on"))
                idle = Trace(Path(folder, "idle"), steps=range(0))
                plugins: dict[str, list[Trace]] = {"without": [], "idle": [idle], "on": [trace]}
                models = {name: build(self) for name in plugins}
                for name, model in models.items():
                    sharded(model, model, partial(polyshard.fully_shard, plugins=plugins[name]))
                seconds = median_seconds(models, STEPS)
                size_bytes = trace.path.stat().st_size
            spans = trace.path.read_text("ascii").count('"ph":"X"')
            return {
                "us a group and step": {n: 1e6 * s / (self.groups + 1) for n, s in seconds.items()},
                "spans a step": spans / (STEPS + 2),
                "bytes a span": size_bytes / spans,
                "us of CPU a span": {
                    "idle": 1e6 * _cpu_seconds(Trace(Path(folder, "a"), steps=range(0))),
                    "on": 1e6 * _cpu_seconds(Trace(Path(folder, "b"))),
                },
            }


def _cpu_seconds(trace: Trace, groups: int = 1000) -> float:
    """Of a span: the least of some turns after the first, writing included."""
    found = []
    for _ in range(8):
        begin = time.process_time()
        for _ in range(groups):  # three spans: a gather, the wait for it, a forward
            trace.on_start("blocks.0", "gather")
            trace.on_unshard("blocks.0", 1 << 20)
            trace.on_unsharded("blocks.0", 1e-4)
            trace.on_forward("blocks.0")
            trace.on_forward_end("blocks.0")
        trace.on_step_end()
        found.append(time.process_time() - begin)
    return min(found[1:]) / (3 * groups)
