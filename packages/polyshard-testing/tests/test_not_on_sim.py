"""What ``pytest --device=sim`` skips exists, and the page lists it."""

from __future__ import annotations

from pathlib import Path

from not_on_sim import NOT_ON_SIM, lines, reason_for

ROOT = Path(__file__).parents[3]


def test_what_is_skipped_exists() -> None:
    for folders in NOT_ON_SIM.values():
        for folder, names in folders.items():
            for name in names:
                file, _, test = name.partition("::")
                path = ROOT / folder / file
                assert path.exists(), path
                assert not test or f"def {test}" in path.read_text("utf-8"), name


def test_others_are_not() -> None:
    assert reason_for("packages/polyshard/tests/torch/test_comm_debug.py::test_x") is not None
    assert reason_for("packages/polyshard/tests/engine/test_training.py::test_x") is None


def test_the_page_lists_it() -> None:
    page = (ROOT / "docs/reference/simulated.md").read_text("utf-8")
    assert "\n".join(lines()) in page
