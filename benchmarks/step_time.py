"""Step time and peak memory against torch's ``fully_shard``, in pairs within one run.

    python benchmarks/step_time.py --width 1024 --layers 8 --tokens 16 --ranks 2

polyshard, torch's FSDP2 and the floor (see floor.py) take turns on the same ranks and data, so that
whatever else the machine does hits all three alike. Reported are medians, the ratio of medians, and
the median of per-turn ratios. Peak memory is measured in runs of its own, one engine a process.
Losses of polyshard and torch are compared step by step.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from floor import Floor
from modes import options_of
from world import run_ranks

import polyshard
from polyshard.demo.model import LanguageModel, ModelSettings

PHASES = ("forward", "backward", "optimizer", "step")
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Case:
    """One row of the benchmark. ``tokens`` are those of one rank's batch of one sequence."""

    width: int = 1024
    layers: int = 8
    tokens: int = 16
    ranks: int = 2
    dtype: str = "float32"
    mode: str = "plain"
    steps: int = 15
    warmup: int = 3

    @property
    def param_dtype(self) -> torch.dtype | None:
        """Compute dtype, or ``None`` for that of the parameters."""
        return None if self.dtype == "float32" else getattr(torch, self.dtype)


def build_model(case: Case) -> LanguageModel:
    """The same values on every rank and for every engine."""
    torch.manual_seed(0)
    settings = ModelSettings(
        width=case.width,
        layers=case.layers,
        heads=max(case.width // 64, 1),
        hidden=case.width * 11 // 4 // 32 * 32,
        sequence=case.tokens,
    )
    return LanguageModel(settings)


class Sharded:
    """A model sharded by one of the engines."""

    def __init__(self, case: Case, fully_shard: Callable[..., Any], policy: type) -> None:
        """Block by block, then the root."""
        self.model: Any = build_model(case)
        mixed = policy(param_dtype=case.param_dtype, reduce_dtype=torch.float32)
        kwargs = options_of(case.mode) | ({"mp_policy": mixed} if case.param_dtype else {})
        self.micro_batches = 2 if case.mode == "accumulate" else 1
        for block in self.model.blocks:
            fully_shard(block, **kwargs)
        fully_shard(self.model, **kwargs)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, foreach=True)

    def step(self, batch: Tensor) -> tuple[float, dict[str, float]]:
        """One training step: loss, and seconds by phase."""
        begin = time.perf_counter()
        for _ in range(self.micro_batches - 1):
            self.model.set_requires_gradient_sync(False)
            loss_of(self.model, batch).backward()
            self.model.set_requires_gradient_sync(True)
        loss = loss_of(self.model, batch)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end = time.perf_counter()
        return loss.item(), _phases(begin, forward, backward, end)


class Unsharded:
    """The floor, with the same phases."""

    def __init__(self, case: Case) -> None:
        """The same model, whole on every rank."""
        model = build_model(case)
        if case.param_dtype:
            model = model.to(case.param_dtype)
        self.floor = Floor(model, list(model.blocks), LEARNING_RATE)

    def step(self, batch: Tensor) -> tuple[float, dict[str, float]]:
        """One step of :class:`Floor`."""
        begin = time.perf_counter()
        self.floor.gather()
        loss = loss_of(self.floor.model, batch)
        forward = time.perf_counter()
        loss.backward()
        self.floor.gather_again_and_reduce()
        backward = time.perf_counter()
        self.floor.zero_grad()
        self.floor.optimizer.step()
        end = time.perf_counter()
        return loss.item(), _phases(begin, forward, backward, end)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Next-byte cross entropy of ``batch`` (``[1, tokens + 1]``)."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def _phases(begin: float, forward: float, backward: float, end: float) -> dict[str, float]:
    values = (forward - begin, backward - forward, end - backward, end - begin)
    return dict(zip(PHASES, values, strict=True))


def build(name: str, case: Case) -> Sharded | Unsharded:
    """An engine by its name in the report."""
    if name == "polyshard":
        return Sharded(case, polyshard.fully_shard, polyshard.MixedPrecisionPolicy)
    if name == "torch":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        return Sharded(case, fully_shard, MixedPrecisionPolicy)
    return Unsharded(case)


def batches(case: Case) -> list[Tensor]:
    """One batch a step, different on every rank."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    shape = (1, case.tokens + 1)
    return [
        torch.randint(0, 256, shape, generator=generator) for _ in range(case.warmup + case.steps)
    ]


def time_engines(case: Case, names: list[str]) -> dict[str, Any]:
    """Take turns, starting with another engine each time."""
    engines = {name: build(name, case) for name in names}
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for index, batch in enumerate(batches(case)):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            loss, phases = engines[name].step(batch)
            losses[name].append(loss)
            if index >= case.warmup:
                seconds[name].append(phases)
    return {"seconds": seconds, "losses": losses}


def measure_memory(case: Case, name: str) -> int:
    """Peak resident bytes of one rank that trains a few steps with one engine alone."""
    engine = build(name, case)
    for batch in batches(case)[:5]:
        engine.step(batch)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def summarize(case: Case, timed: dict[str, Any], memory: dict[str, int]) -> dict[str, Any]:
    """Medians, ratios and whether losses agree."""
    seconds = timed["seconds"]
    medians = {
        name: {phase: statistics.median(turn[phase] for turn in turns) for phase in PHASES}
        for name, turns in seconds.items()
    }
    ratios = {}
    for other in ("torch", "floor"):
        if other in seconds:
            pairs = zip(seconds["polyshard"], seconds[other], strict=True)
            ratios[f"step / {other}"] = medians["polyshard"]["step"] / medians[other]["step"]
            ratios[f"step / {other}, paired"] = statistics.median(
                a["step"] / b["step"] for a, b in pairs
            )
    if {"polyshard", "torch"} <= memory.keys():
        ratios["peak memory / torch"] = memory["polyshard"] / memory["torch"]
    return {
        "case": asdict(case),
        "median_seconds": medians,
        "peak_resident_bytes": memory,
        "ratios": ratios,
        "losses_equal": timed["losses"].get("torch") == timed["losses"]["polyshard"],
        "versions": {"torch": torch.__version__, "polyshard": polyshard.__version__},
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
    }


def show(result: dict[str, Any]) -> None:
    """A table for a person."""
    print(" ".join(f"{k}={v}" for k, v in result["case"].items()))
    print(f"{'':12}" + "".join(f"{phase:>12}" for phase in PHASES) + f"{'peak MiB':>12}")
    for name, medians in result["median_seconds"].items():
        cells = "".join(f"{1e3 * medians[phase]:>9.1f} ms" for phase in PHASES)
        peak = result["peak_resident_bytes"].get(name)
        print(f"{name:12}{cells}" + (f"{peak / 2**20:>12.0f}" if peak else ""))
    for name, ratio in result["ratios"].items():
        print(f"{name:26} {ratio:.3f}")
    print(f"losses equal torch's: {result['losses_equal']}")


def parse() -> tuple[Case, argparse.Namespace]:
    """The case, and what to do about it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field, default in asdict(Case()).items():
        parser.add_argument(f"--{field}", type=type(default), default=default)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--no-memory", action="store_true", help="skip the runs for peak memory")
    parser.add_argument("--no-floor", action="store_true", help="skip the floor")
    options = parser.parse_args()
    values = {k: getattr(options, k) for k in asdict(Case()) if hasattr(options, k)}
    return Case(**values), options


def main() -> None:
    """Run one case."""
    case, options = parse()
    with_floor = case.mode == "plain" and not options.no_floor
    names = ["polyshard", "torch"] + (["floor"] if with_floor else [])
    timed = run_ranks(case.ranks, time_engines, case, names)
    memory = {}
    if not options.no_memory:
        memory = {n: run_ranks(case.ranks, measure_memory, case, n) for n in names[:2]}
    result = summarize(case, timed, memory)
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
