"""The choice of ``polyshard plan --tune`` beside the fastest of settings that are all really run.

    python -m benchmarks.plan.tuning

The machine is measured first, as ``--measure`` does. Each setting is then planned, and run on two
ranks: some take turns in the same processes, so that whatever else the machine does hits all of
those XX"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import (
    command,
    in_turns,
    loss_of,
    run_alone,
    run_ranks,
)
from benchmarks.plan.step import measure_machine
from benchmarks.step.case import Case
from benchmarks.step.engines import batches, build_model, compared
from polyshard_cli.compare.engines.spec import Spec

RANKS = 2
MODEL = Case(width=512, layers=8, tokens=16, steps=9, warmup=2)
AT_ONCE = 6
"""Settings that take turns: all of their models are in memory."""
FINALISTS = 6
FINAL_STEPS = 20
UNITS: tuple[tuple[str, ...], ...] = (
    (),
    ("blocks.*/2",),
    ("blocks.*.attention", "blocks.*.feed_forward"),
    ("none",),
)


@dataclass(frozen=True)
class Setting:
    """One that is planned and run; in the words of the command's options."""

    units: tuple[str, ...] = ()
    mesh: str = "dp=2"
    reshard: bool | None = None
    quantize: str = ""
    offload: str = ""
    flat: bool = True

    @property
    def name(self) -> str:
        words = [" ".join(self.units) or "blocks", self.mesh]
        words += ["kept"] * (self.reshard is False) + [self.quantize] * bool(self.quantize)
        words += [self.offload] * bool(self.offload) + ["not flat"] * (not self.flat)
        return ", ".join(words)


def settings() -> tuple[Setting, ...]:
    """36 of them: what differs in kind, each with every choice of units."""
    others: tuple[dict[str, Any], ...] = (
        {},
        {"flat": False},
        {"reshard": False},
        {"reshard": False, "flat": False},
        {"quantize": "int8"},
        {"reshard": False, "quantize": "int8"},
        {"offload": "optimizer=host"},
        {"offload": "params=host"},
        {"mesh": "replicate=2,dp=1"},
    )
    return tuple(Setting(units, **other) for other, units in product(others, UNITS))


def model_of(case: Case) -> str:
    """What ``polyshard plan`` imports it by."""
    return f"benchmarks.plan.models:{'narrow' if case.width == MODEL.width else 'tiny'}"


def predict(found: list[Setting], case: Case, machine: str) -> list[dict[str, float]]:
    """Seconds and bytes of each, as ``--tune`` plans them; in a process without a process group."""
    from polyshard_cli.plan import Settings, parse_mesh
    from polyshard_cli.plan.drafting import subject_of
    from polyshard_cli.plan.tuning.choice import Choice
    from polyshard_cli.plan.tuning.search import Search

    base = Settings(
        model=model_of(case),
        batch=RANKS,
        sequence=case.tokens,
        machine=machine,
        mesh=parse_mesh(f"dp={RANKS}"),
    )
    search = Search(base, subject_of(base))
    said = []
    for one in found:
        mesh = parse_mesh(one.mesh)
        tried = search.one(Choice(mesh, one.units, one.reshard, one.quantize, one.offload))
        said.append({"step": tried.seconds, "memory": float(tried.memory_bytes)})
    return said


class Engine:
    """A model as a setting shards it, and its optimizer."""

    def __init__(self, setting: Setting, case: Case) -> None:
        from polyshard_cli.plan.dry_run.units import units_of

        tier, _, place = setting.offload.partition("=")
        spec = Spec(
            name=setting.name,
            kind="polyshard",
            keep=setting.reshard is False,
            replicas=RANKS if setting.mesh.startswith("replicate") else 1,
            flat=setting.flat and not setting.offload,
            formats=(setting.quantize, setting.quantize),
            offload=((tier, place),) if tier else (),
        )
        model = build_model(case)
        units = units_of(model, setting.units).values()
        made = compared(spec, model, units, **{"fused" if setting.flat else "foreach": True})
        self.model, self.optimizer = made.model, made.optimizer

    def step(self, batch: torch.Tensor) -> float:
        """Seconds of one."""
        begin = time.perf_counter()
        loss_of(self.model, batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begin


def time_settings(found: list[Setting], case: Case) -> list[list[float]]:
    """Seconds of every step of each, which take turns, beginning with another one each time."""
    every = batches(case)

    def turn(engine: Engine, index: int) -> float:
        dist.barrier()
        return engine.step(every[index])

    ways = {setting.name: partial(turn, Engine(setting, case)) for setting in found}
    return list(in_turns(ways, case.steps, case.warmup).values())


def time_parts(found: list[Setting], case: Case) -> list[list[float]]:
    """The same for all, some at once: processes are started once."""
    seconds = []
    for first in range(0, len(found), AT_ONCE):
        seconds += time_settings(found[first : first + AT_ONCE], case)
        gc.collect()  # models hold themselves in circles
    return seconds


def measure(case: Case) -> dict[str, Any]:
    """Predicted and measured seconds of every setting, and what follows."""
    found = list(settings())
    with TemporaryDirectory() as folder:
        path = str(Path(folder, "machine.json"))
        measure_machine(RANKS, path)
        predicted = run_alone(predict, found, case, path)
    seconds = run_ranks(RANKS, time_parts, found, case)
    rows: list[dict[str, Any]] = [
        {"name": setting.name, "setting": asdict(setting), "seconds": turns}
        for setting, turns in zip(found, seconds, strict=True)
    ]
    for row, said in zip(rows, predicted, strict=True):
        row["predicted"], row["measured"] = said, {"step": statistics.median(row["seconds"])}
    chosen, kept = _chosen(rows), _chosen(_lossless(rows))
    finalists = _finalists(rows, [chosen, kept])
    final = replace(case, steps=FINAL_STEPS) if case == MODEL else case
    again = run_ranks(RANKS, time_settings, [Setting(**row["setting"]) for row in finalists], final)
    for row, turns in zip(finalists, again, strict=True):
        row["final"] = statistics.median(turns)
    fastest, exact = (min(of, key=_final) for of in (finalists, _lossless(finalists)))
    return {
        "case": asdict(case),
        "rows": rows,
        "chosen": chosen["name"],
        "best": fastest["name"],
        "chosen / best": chosen["final"] / fastest["final"],
        "chosen / best, lossless": kept["final"] / exact["final"],
    }


def _chosen(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A plan is for flat steps, so that of equal predictions the flat one is chosen."""
    return min(rows, key=lambda row: (row["predicted"]["step"], not row["setting"]["flat"]))


def _lossless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if not row["setting"]["quantize"]]


def _finalists(rows: list[dict[str, Any]], chosen: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest, and the chosen ones where they are not among them."""
    found = sorted(rows, key=lambda row: row["measured"]["step"])[:FINALISTS]
    return found + [row for row in chosen if row not in found]


def _final(row: dict[str, Any]) -> float:
    return float(row["final"])


if __name__ == "__main__":
    command(measure, MODEL, __doc__)
