"""Step time and bytes as ``polyshard plan`` says them, beside steps that are measured.

    python -m benchmarks.plan.step --only narrow-2 keep

Before each row the machine is measured by as many processes as there are ranks, as ``--measure``
does. Then the row runs with polyshard alone and its best optimizer setting. All of that is done in
several rounds, because machines that others use, too, are not the same one minute later; the ratio
of a row is the median of its rounds'.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import run_alone, run_ranks, show
from benchmarks.result import save
from benchmarks.step.case import Case
from benchmarks.step.rows import ROWS, WIDE, Row
from benchmarks.step.time import OUR_BEST, time_engines

ROUNDS = 3
MACHINE_ROUNDS = 2


def settings_of(case: Case, machine: str) -> dict[str, Any]:
    """What ``polyshard plan`` is asked for ``case``, as keywords of its settings."""
    half = case.ranks // 2
    meshes = {"hsdp": f"replicate=2,dp={half}", "tensor-parallel": f"dp={half},tp=2"}
    settings: dict[str, Any] = {
        "model": f"benchmarks.plan.models:{'wide' if case.width == WIDE.width else 'narrow'}",
        "mesh": meshes.get(case.mode, f"dp={case.ranks}"),
        "sequence": case.tokens,
        "accumulate": case.micro_batches,
        "batch": case.micro_batches * (half if case.mode == "tensor-parallel" else case.ranks),
        "machine": machine,
        "bf16": case.dtype == "bfloat16",
        "reshard": {"keep": False, "blocks": half}.get(case.mode),
    }
    if case.mode == "quantized":
        settings["quantize"] = "int8"
    if case.mode == "columns":
        settings["placement"] = "benchmarks.plan.models:columns"
    if case.mode == "tensor-parallel":
        settings["tp_plan"] = "polyshard_tensor_parallel:demo_plan"
    if case.mode.startswith("offload-"):
        settings["offload"] = case.mode.removeprefix("offload-") + "=host"
    return settings


def predict(settings: dict[str, Any]) -> dict[str, Any]:
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


def measure(
    rows: Iterable[Row] = ROWS, *, quick: bool = False, rounds: int = ROUNDS
) -> Iterator[dict[str, Any]]:
    """Predicted and measured seconds of every row, after each round: they take minutes."""
    chosen = [row.quick() if quick else row for row in rows]
    done: list[dict[str, Any]] = []
    for _ in range(rounds):
        done.append(_round(chosen))
        yield {"rows": {r.name: _middle([found[r.name] for found in done]) for r in chosen}}


def _round(rows: Iterable[Row]) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        return {row.name: _row(row.case, str(Path(folder, "machine.json"))) for row in rows}


def _middle(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The round whose ratio is the median, and the ratios of all."""
    ratios = [found["predicted / measured"] for found in rounds]
    middle = rounds[ratios.index(statistics.median_low(ratios))]
    return {**middle, "rounds": ratios}


def _row(case: Case, machine: str) -> dict[str, Any]:
    measure_machine(case.ranks, machine)
    predicted = run_alone(predict, settings_of(case, machine))
    timed = run_ranks(case.ranks, time_engines, case, [OUR_BEST])
    turns = timed["seconds"][OUR_BEST]
    phases = {phase: statistics.median(turn[phase] for turn in turns) for phase in turns[0]}
    ratio = predicted["step"] / phases["step"]
    return {"predicted": predicted, "measured": phases, "predicted / measured": ratio}


def close(found: dict[str, Any]) -> str:
    """How many rows are predicted well."""
    middles = [row["predicted / measured"] for row in found["rows"].values()]
    return f"within 10 %: {sum(abs(r - 1) <= 0.1 for r in middles)} of {len(middles)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [row.name for row in ROWS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    chosen = [row for row in ROWS if row.name in options.only]
    for found in measure(chosen, quick=options.quick, rounds=options.rounds):
        show(found)
        print(close(found), flush=True)
        if options.json:
            save(found, options.json)


if __name__ == "__main__":
    main()
