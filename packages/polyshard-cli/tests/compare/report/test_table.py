"""Tables and pictures of what was found."""

from __future__ import annotations

from pathlib import Path

import pytest
from compare_found import LONG, found, settings
from rich.console import Console

from polyshard_cli.compare import CompareError, Comparison
from polyshard_cli.compare.ranks.messages import Failure
from polyshard_cli.compare.report.picture import check_picture, draw
from polyshard_cli.compare.report.runs import Run
from polyshard_cli.compare.report.summary import summarize
from polyshard_cli.compare.report.table import show


def printed(comparison: Comparison) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        show(comparison, console)
    return capture.get()


def test_the_table_fits_80_columns_and_says_everything() -> None:
    text = printed(found(job="a/long/path/" * 8))
    assert max(map(len, text.splitlines())) <= 80
    rows = [line.split() for line in text.splitlines()]
    assert ["polyshard", "200.0", "1.00", "5.0", "MiB", "300", "B", "3.0000", "-"] in rows
    assert ["single", "400.0", "2.00", "5.0", "MiB", "300", "B", "3.0000", "none"] in rows
    assert ["fsdp1", "failed"] in rows
    assert "2.5e-01" in text
    assert "failed while building on rank 1: ValueError: so it is" in " ".join(text.split())
    assert LONG in "".join(line[:26].strip() for line in text.splitlines())


def test_a_table_without_any_engine() -> None:
    run = Run("a", failure=Failure(0, "no memory"))
    text = printed(summarize(settings(), [run]))
    assert "a: failed while building on rank 0: no memory" in text
    assert "Compared with" not in text


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"picture{suffix}"
    check_picture(path)
    draw(found(), path)
    begin = path.read_bytes()[:200]
    assert b"PNG" in begin if suffix == ".png" else b"<?xml" in begin
    assert len(path.read_bytes()) > 10_000


def test_a_picture_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(CompareError, match=r"ends in \.png"):
        check_picture(Path("picture.bmp"))
    monkeypatch.setattr("polyshard_cli.compare.report.picture.find_spec", lambda _: None)
    with pytest.raises(CompareError, match=r"pip install 'polyshard-cli\[picture\]'"):
        check_picture(Path("picture.png"))
