"""The choice of ``polyshard plan --tune`` beside the fastest of settings that are all really run.

    python -m benchmarks plan.tuning

The machine is measured first, as ``--measure`` does. Each setting is then planned, and run on two
ranks: some take turns in the same processes, so that whatever else the machine does hits all of
those alike. The fastest, and the chosen ones, take turns once more; their ratios are of that.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch.distributed as dist

from benchmarks.harness import Found, in_turns, run_alone, run_ranks
from benchmarks.plan.models import name_of
from benchmarks.plan.step import measure_machine
from benchmarks.step.case import Case as StepCase
from benchmarks.step.engines import Engine, batches, build_model, compared
from polyshard_cli.compare.engines.spec import parse
from polyshard_cli.plan import Settings, parse_mesh
from polyshard_cli.plan.drafting import subject_of
from polyshard_cli.plan.dry_run.units import units_of
from polyshard_cli.plan.tuning.search import Choice, Search

RANKS = 2
AT_ONCE = 6
"""Settings that take turns: all of their models are in memory."""
FINALISTS = 6
FINAL_STEPS = 20


@dataclass(frozen=True)
class Setting:
    """A choice of ``--tune``, and whether the optimizer's step is flat."""

    choice: Choice
    flat: bool = True

    @property
    def name(self) -> str:
        return self.choice.name + ", not flat" * (not self.flat)

    def build(self, case: StepCase) -> Engine:
        """A model under polyshard, on the ranks."""
        choice = self.choice
        options = {
            "keep": choice.reshard is False,
            "flat": self.flat and not choice.offload,
            choice.quantize: bool(choice.quantize),
            f"offload-{choice.offload}": bool(choice.offload),
        }
        name = "+".join(["polyshard", *(option for option, used in options.items() if used)])
        spec = replace(*parse([name], RANKS), replicas=choice.mesh.size("replicate"))
        model = build_model(case)
        units = units_of(model, choice.units).values()
        made = compared(spec, model, units, **{"fused" if self.flat else "foreach": True})
        return Engine(made.model, made.optimizer, 1)


SHARDS, COPIES = parse_mesh(f"dp={RANKS}"), parse_mesh(f"replicate={RANKS},dp=1")
UNITS = ((), ("blocks.*/2",), ("blocks.*.attention", "blocks.*.feed_forward"), ("none",))
SETTINGS = tuple(
    Setting(replace(choice, units=units), flat)
    for choice, flat in (
        (Choice(SHARDS), True),
        (Choice(SHARDS), False),
        (Choice(SHARDS, reshard=False), True),
        (Choice(SHARDS, reshard=False), False),
        (Choice(SHARDS, quantize="int8"), True),
        (Choice(SHARDS, reshard=False, quantize="int8"), True),
        (Choice(SHARDS, offload="optimizer=host"), True),
        (Choice(SHARDS, offload="params=host"), True),
        (Choice(COPIES), True),
    )
    for units in UNITS
)
"""36 of them: what differs in kind, each with every choice of units."""


def predict(case: StepCase, machine: str) -> list[dict[str, float]]:
    """Seconds and bytes of each, as ``--tune`` plans them; in a process without a process group."""
    base = Settings(
        model=name_of(case), batch=RANKS, sequence=case.tokens, machine=machine, mesh=SHARDS
    )
    search = Search(base, subject_of(base))
    tried = [search.one(setting.choice) for setting in SETTINGS]
    return [{"step": one.seconds, "memory": float(one.memory_bytes)} for one in tried]


def time_settings(found: list[Setting], case: StepCase, at_once: int) -> list[list[float]]:
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


@dataclass(frozen=True)
class Case(StepCase):
    """The model."""

    width: int = 512
    steps: int = 9
    warmup: int = 2

    def measure(self) -> Found:
        """Predicted and measured seconds of every setting, and what follows."""
        with TemporaryDirectory() as folder:
            path = str(Path(folder, "machine.json"))
            measure_machine(RANKS, path)
            predicted = run_alone(predict, self, path)
        times = run_ranks(RANKS, time_settings, list(SETTINGS), self, AT_ONCE)
        measured = dict(zip(SETTINGS, map(median, times), strict=True))
        said = dict(zip(SETTINGS, predicted, strict=True))
        lossless = [setting for setting in SETTINGS if not setting.choice.quantize]

        def chosen(among: Sequence[Setting]) -> Setting:
            """A plan is for flat steps, so that of equal predictions the flat one is chosen."""
            return min(among, key=lambda setting: (said[setting]["step"], not setting.flat))

        best, exact = chosen(SETTINGS), chosen(lossless)
        fastest = sorted(SETTINGS, key=lambda setting: measured[setting])[:FINALISTS]
        finalists = list(dict.fromkeys([*fastest, best, exact]))
        final = replace(self, steps=FINAL_STEPS) if self == Case() else self
        times = run_ranks(RANKS, time_settings, finalists, final, len(finalists))
        again = dict(zip(finalists, map(median, times), strict=True))
        return {
            "case": asdict(self),
            "rows": [
                {
                    "name": setting.name,
                    "predicted": said[setting],
                    "measured": {"step": measured[setting]},
                    "final": again.get(setting),
                }
                for setting in SETTINGS
            ],
            "chosen": best.name,
            "best": min(finalists, key=lambda setting: again[setting]).name,
            "chosen / best": again[best] / min(again.values()),
            "chosen / best, lossless": again[exact]
            / min(spent for setting, spent in again.items() if setting in lossless),
        }
