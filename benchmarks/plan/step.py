"""Step time and bytes as ``polyshard plan`` says them, beside steps that are measured.

    python -m benchmarks plan.step --only narrow-2 keep

Before each row the machine is measured by as many processes as there are ranks, as ``--measure``
does. Then the row runs with polyshard alone and its best optimizer setting. All of that is done in
several rounds, because machines that others use, too, are not the same one minute later; the ratio
of a row is the median of its rounds'.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import harness
from benchmarks.harness import Found, run_alone, run_ranks
from benchmarks.plan.models import columns, name_of
from benchmarks.step.case import Case as StepCase
from benchmarks.step.rows import ROWS, row
from benchmarks.step.time import OUR_BEST, medians, time_engines

MACHINE_ROUNDS = 2
RATIO = "predicted / measured"


@dataclass(frozen=True)
class Case(harness.Case, rounds=1, small=True):
    """Names of step rows, and how often each is measured; with ``small`` their quick cases."""

    only: tuple[str, ...] = tuple(row.name for row in ROWS)
    rounds: int = 3
    small: bool = False

    def measure(self) -> Found:
        """Predicted and measured seconds of every row: of the round whose ratio is the median."""
        cases = {name: row(name).case for name in self.only}
        if self.small:
            cases = {name: case.quick() for name, case in cases.items()}
        with TemporaryDirectory() as folder:
            path = str(Path(folder, "machine.json"))
            rounds = [{n: _row(c, path) for n, c in cases.items()} for _ in range(self.rounds)]
        rows = {name: _middle([each[name] for each in rounds]) for name in cases}
        close = sum(abs(found[RATIO] - 1) <= 0.1 for found in rows.values())
        return {"rows": rows, "within 10 %": f"{close} of {len(rows)}"}


def settings_of(case: StepCase, machine: str) -> dict[str, Any]:
    """What ``polyshard plan`` is asked for ``case``, as keywords of its settings."""
    half = case.ranks // 2
    meshes = {"hsdp": f"replicate=2,dp={half}", "tensor-parallel": f"dp={half},tp=2"}
    data_ranks = half if case.mode == "tensor-parallel" else case.ranks
    modes: dict[str, dict[str, Any]] = {
        "keep": {"reshard": False},
        "blocks": {"reshard": half},
        "quantized": {"quantize": "int8"},
        "columns": {"placement": f"{columns.__module__}:columns"},
        "tensor-parallel": {"tp_plan": "polyshard_tensor_parallel:demo_plan"},
        "offload-params": {"offload": "params=host"},
        "offload-optimizer": {"offload": "optimizer=host"},
    }
    return {
        "model": name_of(case),
        "mesh": meshes.get(case.mode, f"dp={case.ranks}"),
        "sequence": case.tokens,
        "accumulate": case.micro_batches,
        "batch": case.micro_batches * data_ranks,
        "machine": machine,
        "bf16": case.dtype == "bfloat16",
        **modes.get(case.mode, {}),
    }


def predict(settings: dict[str, Any]) -> Found:
    """What the plan says; in a process that has no process group."""
    from polyshard_cli.plan import Settings, draft, parse_mesh

    document = draft(Settings(**{**settings, "mesh": parse_mesh(settings["mesh"])}))
    timing = document.timing
    assert timing is not None, "the benchmark's model runs on the meta device"
    return {
        "step": timing.step_seconds,
        "compute": timing.compute_seconds,
        "gather": timing.gather_seconds,
        "reduce": timing.reduce_seconds,
        "optimizer": timing.optimizer_seconds,
        "exposed": dict(timing.exposed),
        "bytes": document.counted_bytes,
    }


def measure_machine(ranks: int, path: str) -> None:
    """As ``polyshard plan --measure`` does."""
    from polyshard_cli.plan.estimate.machines import save_machine
    from polyshard_cli.plan.estimate.measuring import measure as measured

    save_machine(measured(ranks, MACHINE_ROUNDS), Path(path))


def _middle(rounds: list[Found]) -> Found:
    ratios = [found[RATIO] for found in rounds]
    return {**rounds[ratios.index(median_low(ratios))], "rounds": ratios}


def _row(case: StepCase, machine: str) -> Found:
    measure_machine(case.ranks, machine)
    predicted = run_alone(predict, settings_of(case, machine))
    timed = run_ranks(case.ranks, time_engines, case, [OUR_BEST])
    phases = medians(timed["seconds"][OUR_BEST])
    return {"predicted": predicted, "measured": phases, RATIO: predicted["step"] / phases["step"]}
