"""The page of benchmarks is what results say; arithmetic, and the script for accelerators."""

from __future__ import annotations

import json
import operator
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import polyshard_sim
from benchmarks import mutants
from benchmarks.harness import run_alone, run_ranks
from benchmarks.host.cost import fit
from benchmarks.optimizer import BARS as STEP_BARS
from benchmarks.report.headline import PICTURE, headline
from benchmarks.report.page import PAGE, page
from benchmarks.result import RESULTS, About, Result, read, read_all
from benchmarks.scenarios import SCENARIOS
from benchmarks.step.rows import ROWS, Bar, Row, row
from benchmarks.step.time import FLOOR, MEMORY, STEP, Case, ratios_of
from polyshard_sim.testing import Ranks
from polyshard_testing import RankError

ROOT = Path(__file__).parents[2]
ABOUT = About("a machine", {"torch": "2"}, "abc", "nox -s bench", "2026-01-01")


def lines(name: str, kind: str, found: dict[str, Any], about: About = ABOUT) -> list[str]:
    return page({name: Result(name, kind, about, found)}).splitlines()


def found(ratio: float, *, equal: bool = True) -> dict[str, Any]:
    return {
        "case": {"width": 1024, "tokens": 16, "ranks": 2, "dtype": "float32"},
        "median_seconds": {"polyshard": {"step": ratio}, "torch": {"step": 1.0}},
        "ratios": {STEP: ratio, f"{STEP}, paired": ratio, FLOOR: 1.0, MEMORY: 0.9},
        "resident_bytes": {},
        "losses_equal": equal,
        "losses_largest_relative_difference": 0.0 if equal else 1e-7,
    }


def test_the_committed_page_and_picture_are_made_from_the_committed_results() -> None:
    results = read_all(RESULTS)
    assert PAGE.read_text("utf-8") == page(results), "python -m benchmarks --publish"
    assert PICTURE.read_text("utf-8") == headline(results), "python -m benchmarks --publish"
    names = [each.name for each in ROWS]
    assert len(set(names)) == len(names)
    assert all(f"<!-- {name} -->" in PAGE.read_text("utf-8") for name in {*results} - {*names})


def test_a_missed_bar_is_marked_and_its_reason_told(tmp_path: Path) -> None:
    missed = lines("wide-2", "step-time", found(0.5, equal=False))
    cells = next(line for line in missed if line.startswith("| `wide-2`")).split(" | ")
    assert cells[4] == "**0.50**"
    assert "- `wide-2`, step / torch 0.50, bar 0.40: No reason is recorded yet." in missed
    assert "- `wide-2`, losses: within 1e-07, meant to be bitwise." in missed
    memory = next(line for line in missed if line.startswith("- `wide-2`, peak memory"))
    assert "The peak is the optimizer's" in memory
    assert "None." in lines("narrow-4", "step-time", found(0.5))
    quick = "\n".join(lines("wide-2", "step-time", found(3.0), replace(ABOUT, quick=True)))
    assert "held to no bar: `wide-2`." in quick
    assert "**3.00**" not in quick
    with pytest.raises(ValueError, match="does not measure"):
        Row(name="x", case=Case(), bars=(Bar(MEMORY, 0.75),))
    result = Result("wide-2", "step-time", ABOUT, found(0.5))
    result.write(tmp_path)
    assert read(tmp_path / "wide-2.json") == result


def test_optimizer_steps_and_guards_are_held_to_their_bars() -> None:
    steps = {
        "seconds": {"host": {"flat fused": 0.001, "FSDP2 fused": 0.02}},
        "flat / FSDP2, same setting": {"host": {"fused": 0.06}},
        "ratios": dict.fromkeys(STEP_BARS, 0.06),
    }
    told = lines("optimizer-step", "optimizer", steps)
    assert "| host | fused | 1.00 | 20.00 | 0.060 |" in told
    assert "- host, flat fused / FSDP2's best: **0.060**, bar 0.05" in told
    added = {"NonFinite": 0.02, "Corruption, every=1": 0.03, "Corruption, every=32": 0.001}
    cost = {"step_seconds": {"no guard": 0.5}, "added_to_a_step": added}
    told = lines("guards", "guards", {**cost, "ranks": 2, "tokens": 512, "watched_bytes": 1 << 20})
    assert "| `NonFinite` | **2.00%** |" in told
    assert "| `Corruption, every=1` | 3.00% |" in told


@pytest.mark.parametrize(
    "wrong", [{"mode": "sideways"}, {"dtype": "int8"}, {"mode": "hsdp", "ranks": 2}, {"steps": 0}]
)
def test_a_case_that_cannot_run_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"mode|dtype|at least"):
        replace(Case(), **wrong)
    assert row("hsdp").quick().case.mode == "hsdp"


def test_ratios_are_of_medians_and_of_pairs() -> None:
    def turns(*steps: float) -> list[dict[str, float]]:
        return [dict.fromkeys(("forward", "backward", "optimizer", "step"), s) for s in steps]

    seconds = {"polyshard": turns(1, 2, 9), "torch": turns(4, 4, 3)}
    peaks = {"polyshard": {"peak": 30}, "torch": {"peak": 50}}
    ratios = ratios_of(seconds, peaks)
    assert ratios["step / torch"] == ratios["step / torch, paired"] == 0.5
    assert ratios["peak memory / torch"] == 0.6


def test_the_fit_finds_a_line_among_rows_of_equal_ranks_and_groups() -> None:
    def one(groups: int, parameters: int) -> dict[str, Any]:
        times = {"polyshard": 100.0 + 7.0 * parameters, "torch": 200.0 + 14.0 * parameters}
        sizes = {"ranks": 64, "groups": groups, "parameters": parameters}
        return {**sizes, "microseconds_per_group": times}

    line = fit([one(40, 1), one(40, 8), one(40, 50), one(10, 8)])["torch"]
    assert line["microseconds_per_parameter"] == pytest.approx(14.0)
    assert line["microseconds_per_group"] == pytest.approx(200.0)
    assert line["largest_residual"] == pytest.approx(0.0, abs=1e-9)


def what_a_rank_is() -> tuple[int, int, int, int]:
    return dist.get_world_size(), dist.get_rank(), torch.get_num_threads(), os.getpid()


def what_a_process_alone_is() -> tuple[bool, int, int]:
    return dist.is_initialized(), torch.get_num_threads(), os.getpid()


@pytest.mark.thorough
def test_ranks_are_fresh_processes_whose_failures_are_told() -> None:
    size, rank, threads, process = run_ranks(2, what_a_rank_is)
    assert (size, rank, threads) == (2, 0, 1)
    has_group, threads, alone = run_alone(what_a_process_alone_is)
    assert (has_group, threads) == (False, 1)
    assert len({process, alone, os.getpid()}) == 3
    with pytest.raises(RankError, match=r"(?s)rank 0.*ZeroDivisionError"):
        run_ranks(1, operator.truediv, 1, 0)


@pytest.mark.thorough
def test_scenarios_of_mutants_run_as_they_are() -> None:
    if not polyshard_sim.is_buildable():
        pytest.skip("needs a C++ compiler and ninja")
    setting = mutants.Setting("lowest", strict=False)
    for engine, scenarios in SCENARIOS.items():
        ranks = Ranks(2, mode=setting.mode, strict=setting.strict)
        try:
            assert mutants.usable(ranks, engine, setting, {}) == list(scenarios)
        finally:
            ranks.close()


@pytest.mark.thorough
def test_the_script_for_accelerators_runs_on_the_cpu_when_tiny(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks", "gpu"]
    tiny = [*command, "--quick", "--json", str(out)]
    done = subprocess.run(tiny, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tables = json.loads(out.read_text())["tables"]
    step = tables["Step, bf16 compute, fp32 reduction"]
    assert [each["engine"] for each in step] == ["polyshard", "torch", "ratio"]
    assert all(each["step ms"] > 0 and each["launches"] is None for each in step)
    if not torch.cuda.is_available():
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "sees no CUDA device" in done.stderr
