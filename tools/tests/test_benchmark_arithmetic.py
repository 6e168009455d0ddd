import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.host.cost import fit
from benchmarks.step.spans import Span, parts_by_group
from benchmarks.step.steadiness import summarize
from benchmarks.step.time import ratios_of

ROOT = Path(__file__).parents[2]


def test_ratios_are_of_medians_and_of_pairs() -> None:
    def turns(*steps: float) -> list[dict[str, float]]:
        return [dict.fromkeys(("forward", "backward", "optimizer", "step"), s) for s in steps]

    seconds = {"polyshard": turns(1, 2, 9), "torch": turns(4, 4, 3)}
    peaks = {"polyshard": {"peak": 30, "before": 10}, "torch": {"peak": 50, "before": 10}}
    ratios = ratios_of(seconds, peaks)
    assert ratios["step / torch"] == 0.5  # 2 / 4
    assert ratios["step / torch, paired"] == 0.5  # of 0.25, 0.5, 3
    assert ratios["peak memory / torch"] == 0.6
    assert ratios["peak above start / torch"] == 0.5


def test_a_range_is_taken_apart_and_no_time_is_counted_twice() -> None:
    copy = Span("aten::_foreach_copy_", 10, 30, on_worker=False)
    launch = Span("c10d::send", 30, 35, on_worker=False)
    gather = Span("FSDP::all_gather (blocks.0)", 0, 100, on_worker=False, children=[copy, launch])
    outer = Span("FSDP::pre_forward (blocks.0)", 0, 120, on_worker=False, children=[gather])
    sends = [Span("gloo:send", a, b, on_worker=True) for a, b in ((31, 50), (40, 90))]
    parts = parts_by_group([outer, gather, copy, launch, *sends])["blocks.0"]
    micros = {name: round(1e6 * seconds) for name, seconds in parts.items()}
    expected = {"wait": 75, "copy": 20, "launch": 5, "other": 0, "hook": 20, "transfer": 59}
    assert micros == expected


@pytest.mark.parametrize("name", ["polyshard.wait (root)", "FSDP::all_gather", "FSDP::x ()"])
def test_both_engines_call_the_root_the_same(name: str) -> None:
    assert Span(name, 0, 1, on_worker=False).label_and_group[1] == "(root)"


def test_growth_and_spikes_are_of_the_last_three_quarters() -> None:
    resident = [1e9] * 25 + [4096.0 * index for index in range(75)]
    found = summarize({"resident_bytes": resident, "seconds": [float(n) for n in range(100)]})
    assert found["growth_kib_per_step"] == pytest.approx(4.0)
    assert found["spike_kib"] == pytest.approx(4.0 * 37)
    assert found["p99_seconds"] == 99.0


def test_the_fit_finds_a_line_among_rows_of_equal_ranks_and_groups() -> None:
    def one(groups: int, parameters: int) -> dict[str, object]:
        micros = 100.0 + 7.0 * parameters
        times = {"polyshard": micros, "torch": 2 * micros}
        sizes = {"ranks": 64, "groups": groups, "parameters": parameters}
        return {**sizes, "microseconds_per_group": times}

    line = fit([one(40, 1), one(40, 8), one(40, 50), one(10, 8)])["torch"]
    assert line["microseconds_per_parameter"] == pytest.approx(14.0)
    assert line["microseconds_per_group"] == pytest.approx(200.0)
    assert line["largest_residual"] == pytest.approx(0.0, abs=1e-9)


def test_the_script_for_accelerators_runs_on_the_cpu_when_tiny(tmp_path: Path) -> None:
    pytest.importorskip("polyshard_quantized")
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tables = json.loads(out.read_text())["tables"]
    step = tables["Step, bf16 compute, fp32 reduction"]
    assert [row["engine"] for row in step] == ["polyshard", "torch", "ratio"]
    assert all(row["step ms"] > 0 and row["launches"] is None for row in step)
    assert len(tables["Host transfers"]) == 2
    assert len(tables["Codecs"]) == 7


def test_no_device_is_said_before_anything_runs() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    pytest.importorskip("polyshard_quantized")
    command = [sys.executable, "-m", "benchmarks.gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "sees no CUDA device" in done.stderr
