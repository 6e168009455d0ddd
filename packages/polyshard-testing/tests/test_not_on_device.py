"""What ``pytest --device`` skips exists, and the page counts it."""

from __future__ import annotations

from pathlib import Path

from not_on_device import NOT_ON_ONE, lines, reason_for, reasons

ROOT = Path(__file__).parents[3]


def test_what_is_skipped_exists() -> None:
    for device in NOT_ON_ONE:
        for folders in reasons(device).values():
            for folder, names in folders.items():
                for name in names:
                    file, _, test = name.partition("::")
                    path = ROOT / folder / file
                    assert path.exists(), path
                    # A class may inherit the method.
                    first, is_method, _ = test.partition("[")[0].partition("::")
                    defined = f"{'class' if is_method else 'def'} {first}("
                    assert not test or defined in path.read_text("utf-8"), name


def test_others_are_not() -> None:
    core = "packages/polyshard/tests"
    waits = f"{core}/transport/test_gloo_waits.py::test_x"
    assert reason_for(f"{core}/torch/test_comm_debug.py::test_x", "sim") is not None
    assert reason_for(f"{core}/engine/test_training.py::test_x", "sim") is None
    assert reason_for(waits, "cuda") is not None
    assert reason_for(waits, "sim") is None


def test_the_page_counts_them() -> None:
    page = (ROOT / "docs/reference/simulated.md").read_text("utf-8")
    assert "\n".join(lines()) in page
