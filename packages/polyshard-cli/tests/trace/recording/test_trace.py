"""What is in the files is what ranks did."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from toy_storage import Resting
from trace_runs import WIDTH, events_of, model_of, overlaps, spans, traced, train

from polyshard import describe, stats
from polyshard_cli.trace import Trace, TraceError
from polyshard_testing import PluginConformance, ranks


class TestConformance(PluginConformance):
    @pytest.fixture
    def factory(self, tmp_path: Path) -> Callable[[], object]:
        return partial(Trace, tmp_path)


@ranks(2)
def test_transfers_are_those_that_were_counted(rank: int, size: int, tmp_path: Path) -> None:
    model, _ = traced(str(tmp_path), rank)
    events = events_of(tmp_path / f"rank{rank}.json")
    counted = stats(model).groups
    for kind, what in (("gather", "gathers"), ("reduce", "reductions")):
        found = Counter(e["name"] for e in spans(events, kind))
        assert found == {name: getattr(traffic, what) for name, traffic in counted.items()}
    for name, traffic in counted.items():
        moves = [e for e in spans(events, "gather") + spans(events, "reduce") if e["name"] == name]
        assert sum(e["args"]["bytes"] for e in moves) == traffic.sent_bytes
        waited = sum(e["args"]["wait_us"] for e in moves) / 1e6
        assert waited == pytest.approx(traffic.wait_seconds, abs=1e-7)
    assert {e["name"] for e in spans(events, "gather")} == {g.name for g in describe(model).groups}


@ranks(2)
def test_every_span_is_whole_and_says_what_it_is(rank: int, size: int, tmp_path: Path) -> None:
    traced(str(tmp_path), rank)
    events = events_of(tmp_path / f"rank{rank}.json")
    assert {e["ph"] for e in events} == {"X", "M", "i"}
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")
    assert all(e["pid"] == rank for e in events)
    assert not any("broken" in e["args"] for e in events)
    assert not list(overlaps(events))
    named = {e["tid"] for e in events if e["name"] == "thread_name"}
    assert {e["tid"] for e in events if e["ph"] == "X"} == named
    units = Counter({"(root)": 3, "0": 3, "1": 3})
    assert Counter(e["name"] for e in spans(events, "forward")) == units
    assert Counter(e["name"] for e in spans(events, "backward")) == units
    assert [e["name"] for e in spans(events, "optimizer")] == ["SGD"] * 3
    assert [e["name"] for e in spans(events, "step")] == ["step 0", "step 1", "step 2"]
    for event in spans(events, "gather"):
        said = event["args"]
        assert (said["group"], said["axis"], said["codec"]) == (event["name"], "0", "native")
    steps = spans(events, "step")
    for event in (e for e in events if e["ph"] == "X" and e["cat"] != "step"):
        middle = event["ts"] + event["dur"] / 2
        assert any(s["ts"] <= middle <= s["ts"] + s["dur"] for s in steps)


@ranks(2)
def test_results_are_the_same_bits(rank: int, size: int, tmp_path: Path) -> None:
    model, losses = traced(str(tmp_path), rank)
    plain = model_of()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
    assert train(plain, optimizer, 3, rank) == losses
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())  # type: ignore[attr-defined]


@ranks(2)
def test_steps_are_chosen(rank: int, size: int, tmp_path: Path) -> None:
    traced(str(tmp_path), rank, count=4, steps=range(1, 4, 2))
    events = events_of(tmp_path / f"rank{rank}.json")
    assert [e["name"] for e in spans(events, "step")] == ["step 1", "step 3"]
    gathers = Counter(e["name"] for e in spans(events, "gather"))
    assert gathers == {"0": 4, "1": 4, "(root)": 2}  # the root stays gathered
    assert len(spans(events, "optimizer")) == 2


@ranks(2)
def test_a_step_that_breaks_off_leaves_a_file(rank: int, size: int, tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    model = model_of(trace)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    begin = time.monotonic()

    def break_off() -> None:
        with trace.recording(model, optimizer):
            train(model, optimizer, 1, rank)
            model(torch.ones(2, WIDTH + 1))

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        break_off()
    assert time.monotonic() - begin < 10, "it waited for clocks"
    events = events_of(trace.path)
    assert [e["name"] for e in spans(events, "step")] == ["step 0", "step 1"]
    assert spans(events, "step")[1]["args"]["broken"]
    assert not list(overlaps(events))


@ranks(2)
def test_without_recording_transfers_are_written(rank: int, size: int, tmp_path: Path) -> None:
    """The file is whole after every step, and says nothing of codecs."""
    trace = Trace(tmp_path)
    model = model_of(trace)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    assert not trace.path.exists()
    for steps in range(1, 4):
        train(model, optimizer, 1, rank)
        events = events_of(trace.path)
        assert len(spans(events, "gather")) == 5 * steps
        assert not spans(events, "optimizer")
    assert spans(events, "gather")[0]["args"].keys() == {"group", "bytes", "wait_us"}


@ranks(2)
def test_replicas_and_storages_are_seen(rank: int, size: int, tmp_path: Path) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 1), mesh_dim_names=("copies", "parts")
    )
    trace = Trace(tmp_path)
    model = model_of(trace, Resting(), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with trace.recording(model, optimizer):
        train(model, optimizer, 2, rank)
    events = events_of(trace.path)
    sizes = {g.name: g.shard_bytes for g in describe(model).groups}
    sums = spans(events, "replicas")
    assert Counter(e["name"] for e in sums) == dict.fromkeys(sizes, 2)
    assert all(e["args"]["axis"] == "copies" for e in sums)
    assert all(e["args"]["bytes"] == sizes[e["name"]] for e in sums)
    assert all(e["args"]["axis"] == "parts" for e in spans(events, "gather"))
    staged = spans(events, "staging")
    assert Counter(e["name"] for e in staged) == {"0": 4, "1": 4, "(root)": 2}
    assert all(e["args"]["bytes"] == sizes[e["name"]] for e in staged)
    assert {(e["args"]["storage"], e["args"]["direction"]) for e in staged} == {("away", "fetch")}


@ranks(2)
def test_a_folder_that_one_rank_cannot_write(rank: int, size: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    trace = Trace(tmp_path / "file" if rank == 1 else tmp_path)
    model = model_of(trace)
    wanted = r"rank 1: the trace .*file.rank1.json cannot be written"
    with pytest.raises(TraceError, match=wanted), trace.recording(model):
        raise AssertionError("not reached")


@ranks(2)
def test_a_full_disk_is_told_to_all_ranks(rank: int, size: int, tmp_path: Path) -> None:
    """Rank 1's file cannot grow: the step ends in an error everywhere, and later ones do not."""
    trace = Trace(tmp_path)
    model = model_of(trace)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    train(model, optimizer, 1, rank)
    size_before = trace.path.stat().st_size
    dist.barrier()
    try:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size_before + 100, before[1]))
        with pytest.raises(
            (TraceError, RuntimeError), match=r"rank1.json cannot be written"
        ) as told:
            train(model, optimizer, 3, rank)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ".. " not in str(told.value)  # where the quoted text ends in a full stop
    model.reset_iter_state()
    optimizer.zero_grad()
    train(model, optimizer, 2, rank)
    assert len(spans(events_of(trace.path), "step")) >= (1 if rank == 0 else 0)
    if rank == 1:
        assert trace.path.stat().st_size == size_before


def enter(trace: Trace, model: nn.Module) -> None:
    with trace.recording(model):
        pass


@ranks(2)
def test_mistakes_are_refused_on_every_rank(rank: int, size: int, tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    with pytest.raises(TraceError, match="was sharded without this Trace"):
        enter(trace, model_of())
    with pytest.raises(TraceError, match="Linear has no parameters sharded by polyshard"):
        enter(trace, nn.Linear(2, 2))
    trace = Trace(tmp_path)
    one, other = model_of(trace), model_of(trace)
    with pytest.raises(TraceError, match="watches groups of another model"):
        enter(trace, one)
    del other
    trace = Trace(tmp_path)
    model = model_of(trace)
    enter(trace, model)
    with pytest.raises(TraceError, match="Make another Trace, with another folder"):
        enter(trace, model)
    events = json.loads(trace.path.read_text("ascii"))["traceEvents"]
    assert not spans(events, "step")


@pytest.mark.parametrize("steps", [range(-1, 3), 5, (1, 2)])
def test_steps_are_a_range(steps: object) -> None:
    with pytest.raises(TraceError, match=r"give a range from 0 on, such as range\(5, 8\)"):
        Trace(steps=steps)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [range(100, sys.maxsize), range(7, -1, -1), range(0)])
def test_ranges_are_not_counted_through(steps: range) -> None:
    assert Trace(steps=steps) is not None
