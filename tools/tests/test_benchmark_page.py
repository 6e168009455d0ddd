from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.report.page import PAGE, page
from benchmarks.result import RESULTS, About, Result, read, read_all
from benchmarks.step.case import Case
from benchmarks.step.rows import FLOOR, MAIN_ROWS, MEMORY, ROWS, STEADY_ROW, STEP, Bar, Row, row

ABOUT = About("a machine", {"torch": "2"}, "abc", "nox -s bench", "2026-01-01")


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
