"""The file opens after every step, and has a span for every transfer."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn, ones

from polyshard import fully_shard, stats
from polyshard_gallery.chrome_trace import ChromeTrace
from polyshard_testing import PluginConformance, ranks


def tracing() -> ChromeTrace:
    return ChromeTrace(tempfile.mkdtemp(prefix="polyshard-trace-"))


class TestConformance(PluginConformance):
    @pytest.fixture
    def factory(self) -> Callable[[], object]:
        return tracing


@ranks(2)
def test_spans_are_those_of_the_step(rank: int, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        plugins = [ChromeTrace(Path(folder, f"of-{rank}"))]  # folders may differ by rank
        for layer in model:
            fully_shard(layer, plugins=plugins)
        fully_shard(model, plugins=plugins)
        for step in range(1, 4):
            model(ones(1, 32)).sum().backward()
            text = Path(folder, f"of-{rank}", f"rank{rank}.json").read_text(encoding="ascii")
            events = json.loads(text)  # a whole file, after every step
            assert [e["ph"] for e in events if e["name"] == "step end"] == ["i"] * step
        groups = stats(model).groups
        for what, count in (("all-gather", "gathers"), ("reduce", "reductions")):
            begins = [e for e in events if e["name"] == what and e["ph"] == "b"]
            ends = [e for e in events if e["name"] == what and e["ph"] == "e"]
            wanted = sum(getattr(group, count) for group in groups.values())
            assert len(begins) == len(ends) == wanted > 0
        sent = sum(e["args"]["bytes"] for e in events if e["ph"] == "b")
        assert sent == stats(model).bytes_sent
        assert all(e["pid"] == rank for e in events)
        assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")
