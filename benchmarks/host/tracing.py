"""What a trace costs the host: a step of tiny layers without it, with it idle, and with it on.

    python -m benchmarks.host.tracing --groups 40

One process, torch's fake process group (see cost.py): what is left is Python. The file is written
to a temporary folder. Spans alone are timed as well, in CPU time, which others disturb less.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import polyshard
from benchmarks.host.cost import Size, build, median_seconds, shard
from benchmarks.host.silent import silent_group
from polyshard_trace import Trace

STEPS = 40


def measure(size: Size, folder: Path) -> dict[str, Any]:
    """Microseconds a group and step, and spans of a step."""
    with silent_group(size.ranks):
        trace = Trace(folder / "on")
        plugins = {"without": [], "idle": [Trace(folder / "idle", steps=range(0))], "on": [trace]}
        models = {name: build(size) for name in plugins}
        for name, model in models.items():
            shard(model, partial(polyshard.fully_shard, plugins=plugins[name]))
        seconds = median_seconds(models, STEPS)
        size_bytes = trace.path.stat().st_size
    spans = trace.path.read_text("ascii").count('"ph":"X"')
    groups = size.groups + 1
    return {
        "microseconds_per_group": {name: 1e6 * s / groups for name, s in seconds.items()},
        "spans_per_step": spans / (STEPS + 2),
        "bytes_per_span": size_bytes / spans,
    }


def turn(trace: Trace, groups: int) -> None:
    """Three spans a group: a gather, the wait for it, a forward."""
    for _ in range(groups):
        trace.on_start("blocks.0", "gather")
        trace.on_unshard("blocks.0", 1 << 20)
        trace.on_unsharded("blocks.0", 1e-4)
        trace.on_forward("blocks.0")
        trace.on_forward_end("blocks.0")
    trace.on_step_end()


def cpu_seconds_per_span(trace: Trace, groups: int = 1000) -> float:
    """The least of some turns, writing included."""
    turn(trace, groups)
    found = []
    for _ in range(7):
        begin = time.process_time()
        turn(trace, groups)
        found.append(time.process_time() - begin)
    return min(found) / (3 * groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=Size.ranks)
    parser.add_argument("--groups", type=int, default=Size.groups)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Size(options.ranks, options.groups), Path(folder))
        spans = {
            "idle": cpu_seconds_per_span(Trace(Path(folder, "a"), steps=range(0))),
            "on": cpu_seconds_per_span(Trace(Path(folder, "b"))),
        }
    for name, value in found["microseconds_per_group"].items():
        print(f"{name:>8}: {value:7.1f} us a group and step")
    print(f"{found['spans_per_step']:.0f} spans a step, {found['bytes_per_span']:.0f} bytes each")
    for name, value in spans.items():
        print(f"{name:>8}: {1e6 * value:7.2f} us of CPU a span")


if __name__ == "__main__":
    main()
