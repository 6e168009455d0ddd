"""Both engines on polyshard-sim's virtual clock: a step of a 7B Llama on 8, 64 and 512 H100s.

    python -m benchmarks clock [--ranks 8 64 512] [--tokens 1024 4096] [--json OUT]

Simulated: nothing is computed, and no time is measured. Launches and waits are the engines' own,
as rank 0 of so many makes them; how long each takes is arithmetic on public figures
(``polyshard_sim.clock.Hardware``). Beside it stands what ``polyshard plan`` estimates for
polyshard. Sizes are those of Llama 7B (Touvron et al., "LLaMA", arXiv:2302.13971, table 2).
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import harness
from benchmarks.harness import MIB, Found, Training, bf16, loss_of, run_alone, table
from benchmarks.plan.step import predict
from benchmarks.sim import LIBRARIES
from polyshard_demo.model import LanguageModel, ModelSettings

LLAMA = ModelSettings(
    width=4096, heads=32, hidden=11008, vocabulary=32000, layers=32, sequence=4096
)
WARMUP = 2
LEAST = 5e-5
"""Seconds: less reads 0.0 ms."""
WAITS = ("gathers", "reductions", "other", "host")
ROLES = {"all_gather": "gathers", "reduce_scatter": "reductions", "all_reduce": "reductions"}
"""Of a stream, by the collective that it runs."""


@dataclass(frozen=True)
class Case(harness.Case, ranks=(8,), tokens=(1024,)):
    """Numbers of ranks, and lengths of the one sequence that each has."""

    ranks: tuple[int, ...] = (8, 64, 512)
    tokens: tuple[int, ...] = (1024, 4096)

    def measure(self) -> Found:
        """By ranks and tokens: what the clock says of each engine, and what the plan says."""
        from polyshard_sim.clock import Hardware

        found = [row for ranks in self.ranks for row in run_alone(steps, ranks, self.tokens)]
        for row in found:
            asked = {"mesh": f"dp={row['ranks']}", "sequence": row["tokens"], "bf16": True}
            row["plan"] = run_alone(predict, {"model": "benchmarks.clock:llama", **asked})
            row["plan / clock"] = row["plan"]["step"] / row["engines"]["polyshard"]["step"]
        return {"simulated": True, "hardware": asdict(Hardware()), "rows": found}


def steps(ranks: int, tokens: tuple[int, ...]) -> list[Found]:
    """Of rank 0 of so many, in this process."""
    import polyshard_sim
    from polyshard_sim.clock import Hardware, rank_of

    polyshard_sim.enable(clock=Hardware())
    rows: dict[int, dict[str, Found]] = {count: {} for count in tokens}
    with rank_of(ranks):
        mesh = init_device_mesh("sim", (ranks,))
        for engine in LIBRARIES:
            training = _training(engine, mesh)
            for count in tokens:
                rows[count][engine] = _last(training, count)
            del training
            gc.collect()
            torch.accelerator.empty_cache()
    return [{"ranks": ranks, "tokens": n, "engines": row} for n, row in rows.items()]


def _training(engine: str, mesh: DeviceMesh) -> Training:
    library = LIBRARIES[engine]
    with torch.device("sim"):
        model: Any = llama()
    harness.sharded(model, model.blocks, library.fully_shard, mesh=mesh, **bf16(library))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Training(model, optimizer, partial(loss_of, model))


def llama() -> LanguageModel:
    """On torch's default device."""
    return LanguageModel(LLAMA)


def _last(training: Training, tokens: int) -> Found:
    """The last of some steps, in seconds; the host waits at its end, to read the loss, say."""
    import polyshard_sim
    from polyshard_sim.clock import HOST, host_time_us, record

    batch = torch.empty(1, tokens + 1, dtype=torch.int64, device="sim")
    for _ in range(WARMUP):
        training.step(batch)
        torch.accelerator.synchronize()
    polyshard_sim.reset_counters()
    begin = host_time_us() / 1e6
    with record() as timeline:
        training.step(batch)
        torch.accelerator.synchronize()
    counted = polyshard_sim.counters()
    spans, stream = timeline.spans, torch.accelerator.current_stream().stream_id
    roles = {span.stream: ROLES[span.name] for span in spans if span.name in ROLES}
    waits, collectives = dict.fromkeys(WAITS, 0.0), defaultdict[str, float](float)
    kernels, longest = 0.0, list[Found]()
    for span in spans:
        seconds = span.duration_us / 1e6
        if span.name in ROLES:
            collectives[ROLES[span.name]] += seconds
        elif span.stream == stream and span.awaited is None:
            kernels += seconds
        elif span.stream == stream:
            what = "host" if span.awaited == HOST else roles.get(span.awaited or 0, "other")
            waits[what] += seconds
            longest.append({"for": what, "seconds": seconds, "after": span.begin_us / 1e6 - begin})
    return {
        "step": host_time_us() / 1e6 - begin,
        "kernels": kernels,
        "waits": waits,
        "collectives": dict(collectives),
        "longest waits": sorted(longest, key=lambda wait: -wait["seconds"])[:3],
        "launches": counted.launches,
        "host_waits": counted.host_waits,
        "peak": counted.peak_allocated_bytes / MIB,
    }


def lines(found: Found) -> Iterator[str]:
    """The table of the page, without waits that all rows show as 0.0."""
    rows = [
        (row, [row["engines"][e] | row["engines"][e]["waits"] for e in LIBRARIES])
        for row in found["rows"]
    ]
    sides = [side for _, both in rows for side in both]
    waits = [name for name in WAITS if any(side[name] >= LEAST for side in sides)]
    cells = []
    for row, both in rows:
        step, *others = (
            " / ".join(f"{1e3 * side[name]:.1f}" for side in both)
            for name in ("step", "kernels", *waits)
        )
        ratio = f"{both[0]['step'] / both[1]['step']:.3f}"
        sizes = (str(row["ranks"]), str(row["tokens"]))
        cells.append((*sizes, step, ratio, *others, f"{row['plan / clock']:.2f}"))
    heads = ("ranks", "tokens", "step, ms", "/ FSDP2", "kernels", *waits, "plan / clock")
    yield from table(heads, cells)
