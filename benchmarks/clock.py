"""Both engines on polyshard-sim's virtual clock: a step of a 7B Llama on 8, 64 and 512 H100s.

    python -m benchmarks.clock [--ranks 8 64 512] [--tokens 1024 4096] [--json OUT]

Simulated: nothing is computed, and no time is measured. Launches and waits are the engines' own,
as rank 0 of so many makes them; how long each takes is arithmetic on public figures
(``polyshard_sim.clock.Hardware``). Beside it stands what ``polyshard plan`` estimates for
polyshard. Sizes are those of Llama 7B (Touvron et al., "LLaMA", arXiv:2302.13971, table 2).
"""

from __future__ import annotations

import gc
import importlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import harness
from benchmarks.harness import MIB, Found, command, run_alone, table
from benchmarks.sim import LIBRARIES, bf16
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


def measure(case: Case) -> Found:
    """By ranks and tokens: what the clock says of each engine, and what the plan says."""
    found = [row for ranks in case.ranks for row in run_alone(steps, ranks, case.tokens)]
    for row in found:
        row["plan"] = run_alone(planned, row["ranks"], row["tokens"])
        row["plan / clock"] = row["plan"]["step"] / row["engines"]["polyshard"]["step"]
    return {"simulated": True, "hardware": hardware(), "rows": found}


def hardware() -> Found:
    """What the clock computes with."""
    from polyshard_sim.clock import Hardware

    return asdict(Hardware())


def steps(ranks: int, tokens: tuple[int, ...]) -> list[Found]:
    """Of rank 0 of so many, in this process."""
    import polyshard_sim
    from polyshard_sim.clock import Hardware, rank_of

    polyshard_sim.enable(clock=Hardware())
    rows: dict[int, dict[str, Found]] = {count: {} for count in tokens}
    with rank_of(ranks):
        mesh = init_device_mesh("sim", (ranks,))
        for engine in LIBRARIES:
            step = _training(engine, mesh)
            for count in tokens:
                rows[count][engine] = _last(step, count)
            del step
            gc.collect()
            torch.accelerator.empty_cache()
    return [{"ranks": ranks, "tokens": n, "engines": row} for n, row in rows.items()]


class _Step:
    """Forward, backward, AdamW; the host waits at the end, as one that reads the loss does."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def __call__(self, batch: torch.Tensor) -> None:
        logits = self._model(batch[:, :-1]).flatten(0, 1).float()
        F.cross_entropy(logits, batch[:, 1:].flatten()).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        torch.accelerator.synchronize()


def _training(engine: str, mesh: DeviceMesh) -> _Step:
    library: Any = importlib.import_module(LIBRARIES[engine])
    with torch.device("sim"):
        model = llama()
    harness.sharded(model, model.blocks, library.fully_shard, mesh=mesh, **bf16(library))
    return _Step(model)


def llama() -> LanguageModel:
    """On torch's default device."""
    return LanguageModel(LLAMA)


def _last(step: _Step, tokens: int) -> Found:
    """The last of some steps, in seconds."""
    import polyshard_sim
    from polyshard_sim.clock import HOST, host_time_us, record

    batch = torch.empty(1, tokens + 1, dtype=torch.int64, device="sim")
    for _ in range(WARMUP):
        step(batch)
    polyshard_sim.reset_counters()
    begin = host_time_us() / 1e6
    with record() as timeline:
        step(batch)
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


def planned(ranks: int, tokens: int) -> Found:
    """What ``polyshard plan`` estimates for the same model, in seconds."""
    from polyshard_cli.plan import Settings, draft, parse_mesh

    mesh = parse_mesh(f"dp={ranks}")
    settings = Settings(model=f"{__name__}:llama", mesh=mesh, sequence=tokens, bf16=True)
    timing = draft(settings).timing
    assert timing is not None, "the model runs on the meta device"
    return {
        "step": timing.step_seconds,
        "kernels": timing.compute_seconds + timing.optimizer_seconds,
        "collectives": {"gathers": timing.gather_seconds, "reductions": timing.reduce_seconds},
        "waits": dict(timing.exposed),
    }


def lines(found: Found) -> Iterator[str]:
    """The table of the page, without waits that all rows show as 0.0."""
    sides = [row["engines"][engine] for row in found["rows"] for engine in LIBRARIES]
    waits = [name for name in WAITS if any(_at(side, "waits", name) >= LEAST for side in sides)]
    heads = ("ranks", "tokens", "step, ms", "/ FSDP2", "kernels", *waits, "plan / clock")
    yield from table(heads, (_cells(row, waits) for row in found["rows"]))


def _cells(row: Found, shown: Sequence[str]) -> list[str]:
    ours, theirs = sides = [row["engines"][engine] for engine in LIBRARIES]

    def both(*keys: str) -> str:
        return " / ".join(f"{1e3 * _at(side, *keys):.1f}" for side in sides)

    waits = (both("waits", name) for name in shown)
    ratio = f"{ours['step'] / theirs['step']:.3f}"
    sizes = str(row["ranks"]), str(row["tokens"])
    return [*sizes, both("step"), ratio, both("kernels"), *waits, f"{row['plan / clock']:.2f}"]


def _at(side: Found, *keys: str) -> float:
    value: Any = side
    for key in keys:
        value = value[key]
    return float(value)


if __name__ == "__main__":
    command(measure, Case(), __doc__)
