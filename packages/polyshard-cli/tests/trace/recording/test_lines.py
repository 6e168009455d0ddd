"""The file is valid JSON whenever it is looked at, and says what is wrong with its place."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from polyshard_cli.trace import TraceError
from polyshard_cli.trace.recording.lines import LineFile, path_of


def lines_in(path: Path) -> list[object]:
    found: list[object] = json.loads(path.read_text("ascii"))["traceEvents"]
    return found


def test_every_write_leaves_it_whole(tmp_path: Path) -> None:
    path = path_of(tmp_path / "made", 3)
    file = LineFile(path, {"rank": 3}, ["0"])
    assert lines_in(path) == [0]
    for count in range(1, 5):
        file.add(str(count * 10 + i) for i in range(count))
        assert len(lines_in(path)) == 1 + sum(range(count + 1))
    file.add([])
    file.close()
    assert json.loads(path.read_text("ascii"))["otherData"] == {"rank": 3}
    assert path.name == "rank3.json"


def test_an_older_trace_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    path.write_text("x" * 10_000)
    LineFile(path, {}, ["1"]).close()
    assert lines_in(path) == [1]


@contextmanager
def small_files() -> Iterator[None]:
    """Files of this process cannot grow beyond 500 bytes: a full disk, to the writer.

    That is true of what the tests print as well, where it goes to a file; so not for long.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_was_written_before_the_disk_was_full_stays(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    file = LineFile(path, {}, ["1", "2"])
    with small_files(), pytest.raises(TraceError) as caught:
        file.add(["3"] * 1000)
    assert "rank0.json cannot be written: " in str(caught.value)
    assert "; free space" in str(caught.value)
    assert lines_in(path) == [1, 2]
    file.add(["4"])
    assert lines_in(path) == [1, 2, 4]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match="give Trace a folder that this rank can write"):
        LineFile(path_of(tmp_path / "file", 0), {}, ["1"])
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / "rank0.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TraceError, match=r"rank0\.json"):
        LineFile(tmp_path / "rank0.json", {}, ["1"])
    assert (tmp_path / "elsewhere").read_text() == "precious"
