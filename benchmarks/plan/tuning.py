"""The choice of ``polyshard plan --tune`` beside the fastest of settings that are all really run.

    python -m benchmarks.plan.tuning

The machine is measured first, as ``--measure`` does. Each setting is then planned, and run on two
ranks: some take turns in the same processes, so that whatever else the machine does hits all of
those alike. The fastest, and the chosen ones, take turns once more; their ratios are of that.
"""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

from benchmarks.harness import Found, command, in_turns, run_alone, run_ranks
from benchmarks.plan.models import name_of
from benchmarks.plan.step import measure_machine
from benchmarks.step.case import Case
from benchmarks.step.engines import Engine, batches, build_model, compared
from polyshard_cli.compare.engines.spec import Spec

RANKS = 2
MODEL = Case(width=512, layers=8, tokens=16, steps=9, warmup=2)
AT_ONCE = 6
"""Settings that take turns: all of their models are in memory."""
FINALISTS = 6
FINAL_STEPS = 20


@dataclass(frozen=True)
class Setting:
    """One that is planned and run; in the words of the command's options."""

    units: tuple[str, ...] = ()
    mesh: str = f"dp={RANKS}"
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

    def build(self, case: Case) -> Engine:
        """A model under polyshard, on the ranks."""
        from polyshard_cli.plan.dry_run.units import units_of

        tier, _, place = self.offload.partition("=")
        spec = Spec(
            name=self.name,
            kind="polyshard",
            keep=self.reshard is False,
            replicas=RANKS if self.mesh.startswith("replicate") else 1,
            flat=self.flat and not self.offload,
            formats=(self.quantize, self.quantize),
            offload=((tier, place),) if tier else (),
        )
        model = build_model(case)
        units = units_of(model, self.units).values()
        made = compared(spec, model, units, **{"fused" if self.flat else "foreach": True})
        return Engine(made.model, made.optimizer, 1)


UNITS = ((), ("blocks.*/2",), ("blocks.*.attention", "blocks.*.feed_forward"), ("none",))
OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"flat": False},
    {"reshard": False},
    {"reshard": False, "flat": False},
    {"quantize": "int8"},
    {"reshard": False, "quantize": "int8"},
    {"offload": "optimizer=host"},
    {"offload": "params=host"},
    {"mesh": f"replicate={RANKS},dp=1"},
)
SETTINGS = tuple(Setting(units, **other) for other, units in product(OTHERS, UNITS))
"""36 of them: what differs in kind, each with every choice of units."""


def predict(case: Case, machine: str) -> list[dict[str, float]]:
    """Seconds and bytes of each, as ``--tune`` plans them; in a process without a process group."""
    from polyshard_cli.plan import Settings, parse_mesh
    from polyshard_cli.plan.drafting import subject_of
    from polyshard_cli.plan.tuning.choice import Choice
    from polyshard_cli.plan.tuning.search import Search

    base = Settings(
        model=name_of(case),
        batch=RANKS,
        sequence=case.tokens,
        machine=machine,
        mesh=parse_mesh(f"dp={RANKS}"),
    )
    search = Search(base, subject_of(base))
    said = []
    for one in SETTINGS:
        mesh = parse_mesh(one.mesh)
        tried = search.one(Choice(mesh, one.units, one.reshard, one.quantize, one.offload))
        said.append({"step": tried.seconds, "memory": float(tried.memory_bytes)})
    return said


def time_settings(found: list[Setting], case: Case, at_once: int) -> list[list[float]]:
    """Seconds of every step of each; ``at_once`` of them take turns, all in the same processes."""
    every = batches(case, case.warmup + case.steps)

    def turn(engine: Engine, index: int) -> float:
        dist.barrier()
        return engine.step(every[index])[1]["step"]

    times: list[list[float]] = []
    for first in range(0, len(found), at_once):
        chosen = found[first : first + at_once]
        ways = {setting.name: partial(turn, setting.build(case)) for setting in chosen}
        times += in_turns(ways, case.steps, case.warmup).values()
        del ways
        gc.collect()  # models hold themselves in circles
    return times


def measure(case: Case) -> Found:
    """Predicted and measured seconds of every setting, and what follows."""
    with TemporaryDirectory() as folder:
        path = str(Path(folder, "machine.json"))
        measure_machine(RANKS, path)
        predicted = run_alone(predict, case, path)
    times = run_ranks(RANKS, time_settings, list(SETTINGS), case, AT_ONCE)
    rows: list[Found] = [
        {
            "name": setting.name,
            "setting": asdict(setting),
            "seconds": turns,
            "predicted": said,
            "measured": {"step": median(turns)},
        }
        for setting, turns, said in zip(SETTINGS, times, predicted, strict=True)
    ]
    chosen, kept = _chosen(rows), _chosen(_lossless(rows))
    finalists = sorted(rows, key=lambda row: float(row["measured"]["step"]))[:FINALISTS]
    finalists += [row for row in (chosen, kept) if row not in finalists]
    final = replace(case, steps=FINAL_STEPS) if case == MODEL else case
    again = [Setting(**row["setting"]) for row in finalists]
    times = run_ranks(RANKS, time_settings, again, final, len(again))
    for row, turns in zip(finalists, times, strict=True):
        row["final"] = median(turns)
    fastest, exact = (min(of, key=_final) for of in (finalists, _lossless(finalists)))
    return {
        "case": asdict(case),
        "rows": rows,
        "chosen": chosen["name"],
        "best": fastest["name"],
        "chosen / best": chosen["final"] / fastest["final"],
        "chosen / best, lossless": kept["final"] / exact["final"],
    }


def _chosen(rows: list[Found]) -> Found:
    """A plan is for flat steps, so that of equal predictions the flat one is chosen."""
    return min(rows, key=lambda row: (row["predicted"]["step"], not row["setting"]["flat"]))


def _lossless(rows: list[Found]) -> list[Found]:
    return [row for row in rows if not row["setting"]["quantize"]]


def _final(row: Found) -> float:
    return float(row["final"])


if __name__ == "__main__":
    command(measure, MODEL, __doc__)
