"""Files made by hand are merged as arithmetic says; what does not belong together is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from polyshard_cli.trace import TraceError, merge, summarize
from polyshard_cli.trace.clocks.offset import Offset
from polyshard_cli.trace.events import CLOCK, Kind, Span, instant_line, process_lines
from polyshard_cli.trace.reading.table import show_summary
from polyshard_cli.trace.recording.lines import LineFile, path_of

SECOND = 10**9


@dataclass(frozen=True)
class Made:
    """One rank's file; its clock shows ``ahead_ns`` more than rank 0's."""

    rank: int
    ahead_ns: int = 0
    size: int = 2
    run: str = "r"
    compared: bool = True

    def write(self, folder: Path, *spans: Span) -> Path:
        host = f"h{self.rank}"
        head = {
            "polyshard_trace": 1,
            "rank": self.rank,
            "world_size": self.size,
            "host": host,
            "opened_ns": self.ahead_ns,
            "opened_wall_ns": 77 * SECOND,
        }
        path = path_of(folder, self.rank)
        file = LineFile(path, head, process_lines(self.rank, host))
        if self.compared:
            note: dict[str, Any] = {"at_ns": self.ahead_ns, "offset_ns": -self.ahead_ns}
            note |= {"uncertainty_ns": 2000, "run": self.run}
            file.add([instant_line(CLOCK, self.rank, self.ahead_ns, note)])
        file.add(span.line(self.rank) for span in spans)
        file.close()
        return path


def span(begin_ns: int, num_bytes: int = 100, wait_us: float = 2.0) -> Span:
    args = {"group": "a", "bytes": num_bytes, "wait_us": wait_us}
    return Span(Kind.GATHER, "a", begin_ns, begin_ns + 5000, 0, args)


def test_a_file_of_another_schema_says_so(tmp_path: Path) -> None:
    path = Made(0).write(tmp_path, span(1000))
    path.write_text(path.read_text().replace('"polyshard_trace": 1', '"polyshard_trace": 2'))
    with pytest.raises(TraceError, match="schema 2, this version reads 1"):
        summarize(tmp_path)


def test_times_are_per_recorded_step(tmp_path: Path) -> None:
    """Rank 1 was killed after its first step."""
    steps = [Span(Kind.STEP, "step", at, at + 10**7, 0, {}) for at in (1000, 2 * 10**7)]
    Made(0).write(tmp_path, *steps)
    Made(1).write(tmp_path, steps[0])
    console = Console(width=200, record=True)
    show_summary(summarize(tmp_path), console, 10)
    assert "2 steps on 2 ranks, 10.00 ms each" in console.export_text()


@pytest.mark.parametrize("compared", [True, False], ids=["compared", "by wall clocks"])
def test_ranks_are_put_in_one_clock(tmp_path: Path, compared: bool) -> None:
    ahead = 1234 * SECOND + 567
    Made(0, compared=compared).write(tmp_path, span(1000))
    Made(1, ahead, compared=compared).write(tmp_path, span(ahead + 3000))
    merged = merge(tmp_path, tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    found = [e for e in content["traceEvents"] if e["ph"] == "X"]
    assert [(e["pid"], e["ts"], e["dur"]) for e in found] == [(0, 1.0, 5.0), (1, 3.0, 5.0)]
    assert [one.offset_us for one in merged.ranks] == [0, -ahead / 1e3]
    assert merged.ranks[1].uncertainty_us == (2.0 if compared else None)
    assert content["otherData"]["merged"][1]["host"] == "h1"
    assert merged.missing == ()


def test_drift_moves_begin_and_end(tmp_path: Path) -> None:
    """Rank 1's clock runs twice as fast, which two offsets show."""
    Made(0).write(tmp_path)
    path = Made(1).write(tmp_path, Span(Kind.WAIT, "a", 1000, 3000))
    text = path.read_text()
    last = Offset(4000, -2000, 2000)
    note = {"run": "", "at_ns": 4000, "offset_ns": last.offset_ns, "uncertainty_ns": 2000}
    path.write_text(text.replace("\n]}", ",\n" + instant_line(CLOCK, 1, 4000, note) + "\n]}"))
    merged = merge(tmp_path, tmp_path / "trace.json")
    found = [e for e in json.loads(merged.path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert [(e["ts"], e["dur"]) for e in found] == [(0.5, 1.0)]
    assert merged.ranks[1].drift_ppm == pytest.approx(-0.5e6)


def test_a_rank_that_was_killed_while_it_wrote(tmp_path: Path) -> None:
    path = Made(0, size=1).write(tmp_path, span(1000), span(9000))
    whole = path.read_bytes()
    for length in range(whole.index(b"9.000"), len(whole)):
        path.write_bytes(whole[:length])
        merged = merge(tmp_path, tmp_path / "trace.json")
        assert merged.ranks[0].events in (1, 2)
        json.loads(merged.path.read_text())


def test_sums_are_those_of_the_spans(tmp_path: Path) -> None:
    step = Span(Kind.STEP, "step 0", 0, 50_000)
    Made(0).write(tmp_path, step, span(0), span(9000, 300, 1.0), Span(Kind.FORWARD, "a", 0, 4000))
    Made(1).write(tmp_path, step, span(0, 50, 0.0))
    found = summarize(tmp_path)
    assert (found.ranks, found.steps) == (2, 1)
    assert found.step_seconds == pytest.approx(1e-4)
    gather, forward = found.rows
    assert (gather.name, gather.kind, gather.calls, gather.sent_bytes) == ("a", "gather", 3, 450)
    assert gather.seconds == pytest.approx(15e-6)
    assert gather.waited_seconds == pytest.approx(3e-6)
    assert gather.bytes_per_second == pytest.approx(450 / 15e-6)
    assert (forward.calls, forward.waited_seconds, forward.sent_bytes) == (1, None, None)
    assert [(row.kind, row.calls) for row in found.kinds] == [("forward", 1), ("gather", 3)]
    assert summarize(tmp_path, rank=1).rows[0].sent_bytes == 50


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"has no rank0\.json"):
        merge(tmp_path, tmp_path / "trace.json")
    Made(0).write(tmp_path)
    assert merge(tmp_path, tmp_path / "trace.json").missing == (1,)
    Made(1, run="other").write(tmp_path)
    with pytest.raises(TraceError, match="are of different runs"):
        merge(tmp_path, tmp_path / "trace.json")
    Made(1, size=3).write(tmp_path)
    with pytest.raises(TraceError, match="of 3 and 2 ranks"):
        merge(tmp_path, tmp_path / "trace.json")
    Made(1).write(tmp_path).rename(tmp_path / "rank2.json")
    (tmp_path / "rank1.json").write_bytes((tmp_path / "rank2.json").read_bytes())
    with pytest.raises(TraceError, match="both of rank 1"):
        merge(tmp_path, tmp_path / "trace.json")
    (tmp_path / "rank2.json").write_text('{"a": 1}')
    with pytest.raises(TraceError, match="is not a trace of one rank"):
        summarize(tmp_path)
    (tmp_path / "rank2.json").unlink()
    with pytest.raises(TraceError, match="it has those of 0, 1"):
        summarize(tmp_path, rank=7)


def test_a_merge_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    Made(0).write(tmp_path)
    with pytest.raises(TraceError, match=r"nowhere/trace\.json cannot be written"):
        merge(tmp_path, tmp_path / "nowhere" / "trace.json")
    (tmp_path / "taken").mkdir()
    with pytest.raises(TraceError, match="taken cannot be written"):
        merge(tmp_path, tmp_path / "taken")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank0.json", "taken"]
