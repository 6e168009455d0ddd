from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.optimizer.bars import STEP_BARS
from benchmarks.report.headline import PICTURE, headline
from benchmarks.report.headline import ROWS as HEADLINE_ROWS
from benchmarks.report.page import PAGE, page
from benchmarks.result import RESULTS, About, Result, read, read_all
from benchmarks.step.case import Case
from benchmarks.step.rows import (
    BEST_STEP,
    FLAT_MEMORY,
    FLOOR,
    MAIN_ROWS,
    MEMORY,
    ROWS,
    STEADY_ROW,
    STEP,
    Bar,
    Row,
    row,
)

ABOUT = About("a machine", {"torch": "2"}, "abc", "nox -s bench", "2026-01-01")


RATIOS = {STEP: 0.3, f"{STEP}, paired": 0.3, FLOOR: 1.0, MEMORY: 0.7}


def found(ratio: float, *, equal: bool = True) -> dict[str, object]:
    case = {"width": 1024, "tokens": 16, "ranks": 2, "dtype": "float32"}
    return {
        "case": case,
        "median_seconds": {"polyshard": {"step": ratio}, "torch": {"step": 1.0}},
        "ratios": {STEP: ratio, f"{STEP}, paired": ratio, FLOOR: 1.0, MEMORY: 0.9},
        "losses_equal": equal,
        "losses_largest_relative_difference": 0.0 if equal else 1e-7,
    }


def test_the_committed_page_is_made_from_the_committed_results() -> None:
    assert PAGE.read_text("utf-8") == page(read_all(RESULTS)), "python -m benchmarks.report.page"


def test_rows_have_names_of_their_own_and_the_named_ones_exist() -> None:
    names = [each.name for each in ROWS]
    assert len(set(names)) == len(names)
    assert {*MAIN_ROWS, STEADY_ROW} <= set(names)


def test_a_missed_bar_is_marked_and_its_reason_told() -> None:
    lines = page({"wide-2": Result("wide-2", "step-time", ABOUT, found(0.5))}).splitlines()
    cells = next(line for line in lines if line.startswith("| `wide-2`")).split(" | ")
    assert cells[4] == "**0.50**"
    assert "- `wide-2`, step / torch 0.50, bar 0.40: No reason is recorded yet." in lines
    memory = next(line for line in lines if line.startswith("- `wide-2`, peak memory"))
    assert "The peak is the optimizer's" in memory


def test_a_bar_that_holds_is_not_marked() -> None:
    text = page({"narrow-4": Result("narrow-4", "step-time", ABOUT, found(0.5))})
    assert "**0.50**" not in text
    assert "\nNone.\n" in text


def test_best_settings_have_a_table_with_the_other_engines() -> None:
    best = found(0.3)
    best["ratios"] = {**RATIOS, BEST_STEP: 0.4, FLAT_MEMORY: 0.7}
    best["median_seconds"] = {
        **{n: {"step": 1.0} for n in ("polyshard", "torch")},
        **{n: {"step": s} for n, s in (("polyshard best", 0.4), ("torch best", 1.0), ("ddp", 0.6))},
    }
    best["resident_bytes"] = {"polyshard best": {"peak": 700 << 20}, "ddp": {"peak": 900 << 20}}
    lines = page({"wide-2": Result("wide-2", "step-time", ABOUT, best)}).splitlines()
    cells = [line for line in lines if line.startswith("| `wide-2`")][1].strip("| ").split(" | ")
    assert cells[1:8] == ["400.0", "1000.0", "**0.40**", "0.35", "", "600.0", ""]
    assert cells[8:] == ["700", "", "", "900", "", "0.70"]
    assert any("step / torch best 0.40, bar 0.35" in line for line in lines)


def test_optimizer_steps_are_held_to_their_bars() -> None:
    seconds = {"flat fused": 0.001, "FSDP2 fused": 0.02}
    steps = {
        "seconds": {"host": seconds},
        "flat / FSDP2, same setting": {"host": {"fused": 0.06}},
        "ratios": dict.fromkeys(STEP_BARS, 0.06),
    }
    text = page({"optimizer-step": Result("optimizer-step", "optimizer", ABOUT, steps)})
    assert "| host | fused | 1.00 | 20.00 | 0.060 |" in text
    assert "- host, flat fused / FSDP2's best: **0.060**, bar 0.05" in text
    assert "- large, flat fused / FSDP2 fused: 0.060, bar 1.05" in text


def test_losses_that_should_be_equal_and_are_not_are_a_missed_bar() -> None:
    text = page({"wide-2": Result("wide-2", "step-time", ABOUT, found(0.3, equal=False))})
    assert "- `wide-2`, losses: within 1e-07, meant to be bitwise." in text


def test_a_quick_run_says_that_it_means_nothing() -> None:
    quick = Result("wide-2", "step-time", replace(ABOUT, quick=True), found(3.0))
    text = page({"wide-2": quick})
    assert "These figures mean nothing" in text
    assert "held to no bar: `wide-2`." in text
    assert "**3.00**" not in text


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    result = Result("wide-2", "step-time", ABOUT, {"ratios": {STEP: 0.25}})
    result.write(tmp_path)
    assert read(tmp_path / "wide-2.json") == result


def test_a_bar_on_memory_needs_memory_to_be_measured() -> None:
    with pytest.raises(ValueError, match="does not measure"):
        Row(name="x", case=Case(), bars=(Bar(MEMORY, 0.75),))


@pytest.mark.parametrize(
    "wrong", [{"mode": "sideways"}, {"dtype": "int8"}, {"mode": "hsdp", "ranks": 2}, {"steps": 0}]
)
def test_a_case_that_cannot_run_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"mode|dtype|at least"):
        replace(Case(), **wrong)  # type: ignore[arg-type]


def test_a_quick_row_keeps_its_mode_and_has_no_bars() -> None:
    quick = row("hsdp").quick()
    assert (quick.case.mode, quick.case.ranks, quick.bars) == ("hsdp", 4, ())


def test_what_guards_cost_is_held_to_its_bar_at_the_defaults() -> None:
    added = {"NonFinite": 0.02, "Corruption, every=1": 0.03, "Corruption, every=32": 0.001}
    guards = {"step_seconds": {"no guard": 0.5}, "added_to_a_step": added}
    cost = {**guards, "ranks": 2, "tokens": 512, "watched_bytes": 1 << 20}
    lines = page({"guards": Result("guards", "guards", ABOUT, cost)}).splitlines()
    assert "| `NonFinite` | **2.00%** |" in lines
    assert "| `Corruption, every=1` | 3.00% |" in lines
    assert "| `Corruption, every=32` | 0.10% |" in lines


def test_the_readmes_picture_shows_the_results() -> None:
    results = read_all(RESULTS)
    text = headline(results)
    assert PICTURE.read_text("utf-8") == text, "run python -m benchmarks.report.headline"
    for name in HEADLINE_ROWS:
        assert f">{results[name].found['ratios'][STEP]:.2f}</text>" in text
