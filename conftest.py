"""What every distribution's tests share: the path to helpers, and why tests are skipped."""

from __future__ import annotations

import gc
import importlib
import signal
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import settings

# A worker shares its core with others, so the time of one example says nothing.
settings.register_profile("shared-cores", deadline=None)
settings.load_profile("shared-cores")

# Each distribution's helpers, under names of their own; ranks take this path along.
sys.path[:0] = map(str, sorted(Path(__file__).parent.glob("p*/*/tests/helpers")))

pytest_plugins = ["polyshard_testing.fixtures", "pytester", "headless"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options: what marks leave out (``thorough``, ``sampled``, ``pairwise``), and the device."""
    parser.addoption("--thorough", action="store_true", help="run what samples leave out as well")
    parser.addoption(
        "--device",
        default="cpu",
        help="where ranks compute unless a test says: cpu, cuda, or sim (polyshard-sim)",
    )


def pytest_collection_finish() -> None:
    """What is imported by now stays; no collection of garbage searches it again."""
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    """Whoever starts tests in the background has them ignore SIGINT, and all that they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put slow files first; skip ``gpu`` tests without an accelerator, and what is sampled out."""
    slow = {item.path for item in _marked(items, "slow")}
    items.sort(key=lambda item: item.path not in slow)  # workers take files in this order
    if not config.getoption("--thorough"):
        left_out = _marked(items, "thorough") + _out_of_sample(items) + _not_needed_for_pairs(items)
        _skip(left_out, "takes long; run with --thorough")
    if config.getoption("--device") == "sim":
        _skip_not_on_sim(items)
    if not (marked := _marked(items, "gpu")):
        return  # the tests of the tooling should not import torch

    import torch

    if not torch.accelerator.is_available():
        _skip(marked, "needs an accelerator, and torch sees none")


def _skip_not_on_sim(items: list[pytest.Item]) -> None:
    """What cannot run on the simulated device, with the reason."""
    not_on_sim = importlib.import_module("not_on_sim")
    for item in items:
        if reason := not_on_sim.reason_for(item.nodeid):
            _skip([item], f"not on sim: {reason}")


def _out_of_sample(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of a test marked ``sampled(n)`` all parametrizations but the first of each n."""
    seen: Counter[str] = Counter()
    left_out = []
    for item in _marked(items, "sampled"):
        mark = item.get_closest_marker("sampled")
        assert mark is not None
        test = item.nodeid.partition("[")[0]
        if seen[test] % mark.args[0]:
            left_out.append(item)
        seen[test] += 1
    return left_out


def _not_needed_for_pairs(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of a test marked ``pairwise`` all parametrizations but those that try every pair of values.

    The next one chosen is always the one with the most pairs that no chosen one has.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in _marked(items, "pairwise"):
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = []
    for cases in tests.values():
        pairs = {case: _pairs_of(case) for case in cases}
        missing = set().union(*pairs.values())
        while missing:
            chosen = max(pairs, key=lambda case: len(pairs[case] & missing))
            missing -= pairs.pop(chosen)
        left_out += list(pairs)
    return left_out


def _pairs_of(item: pytest.Item) -> set[tuple[tuple[str, int], ...]]:
    """The pairs of values that a parametrization tries, by names and indices."""
    assert isinstance(item, pytest.Function)
    return set(combinations(sorted(item.callspec.indices.items()), 2))


def _marked(items: list[pytest.Item], name: str) -> list[pytest.Item]:
    return [item for item in items if item.get_closest_marker(name)]


def _skip(items: list[pytest.Item], reason: str) -> None:
    for item in items:
        item.add_marker(pytest.mark.skip(reason=reason))
