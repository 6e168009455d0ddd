"""What every distribution's tests share: the path to helpers, and why tests are skipped."""

from __future__ import annotations

import gc
import importlib
import signal
import sys
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
    """Options: what marks leave out (``thorough``, ``sampled``), and the device."""
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
    """A shell that starts tests in the background has them ignore SIGINT, and all they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put slow files first; skip ``gpu`` tests without an accelerator, and what is sampled out."""
    slow = {item.path for item in _marked(items, "slow")}
    items.sort(key=lambda item: item.path not in slow)  # workers take files in this order
    if not config.getoption("--thorough"):
        _skip(_marked(items, "thorough") + _out_of_sample(items), "takes long; run with --thorough")
    if (device := config.getoption("--device")) != "cpu":
        _skip_not_on(device, items)
    if not (marked := _marked(items, "gpu")):
        return  # the tests of the tooling should not import torch

    import torch

    if not torch.accelerator.is_available():
        _skip(marked, "needs an accelerator, and torch sees none")


def _skip_not_on(device: str, items: list[pytest.Item]) -> None:
    """What cannot run on a device, with the reason."""
    not_on_device = importlib.import_module("not_on_device")
    for item in items:
        if reason := not_on_device.reason_for(item.nodeid, device):
            _skip([item], f"not on {device}: {reason}")


def _out_of_sample(items: list[pytest.Item]) -> list[pytest.Item]:
    """What the gate leaves out of tests marked ``sampled(n)``."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in _marked(items, "sampled"):
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = []
    for cases in tests.values():
        mark = cases[0].get_closest_marker("sampled")
        assert mark is not None
        # Of one parameter one value in n; of several, combinations that differ as much as can be.
        chosen = cases[:: mark.args[0]]
        if len(names := _varied(cases)) > 1:
            chosen = _apart(cases, names, len(chosen))
        left_out += [case for case in cases if case not in chosen]
    return left_out


def _apart(cases: list[pytest.Item], names: set[str], most: int) -> list[pytest.Item]:
    """At most so many cases, and no more than it takes for any two values to meet.

    The next is always the one with most values, then with most pairs of them, not yet had.
    """
    values = {case: {pair for pair in _values(case).items() if pair[0] in names} for case in cases}
    pairs = {case: set(combinations(sorted(values[case]), 2)) for case in cases}
    new_values, new_pairs = set().union(*values.values()), set().union(*pairs.values())
    chosen: list[pytest.Item] = []
    while new_pairs and len(chosen) < most:
        best = max(
            pairs, key=lambda case: (len(values[case] & new_values), len(pairs[case] & new_pairs))
        )
        new_values -= values[best]
        new_pairs -= pairs.pop(best)
        chosen.append(best)
    return chosen


def _varied(cases: list[pytest.Item]) -> set[str]:
    """Names of the parameters that have several values."""
    values = [_values(case) for case in cases]
    return {name for name in values[0] if len({each[name] for each in values}) > 1}


def _values(item: pytest.Item) -> dict[str, str]:
    assert isinstance(item, pytest.Function)
    return {name: repr(value) for name, value in item.callspec.params.items()}


def _marked(items: list[pytest.Item], name: str) -> list[pytest.Item]:
    return [item for item in items if item.get_closest_marker(name)]


def _skip(items: list[pytest.Item], reason: str) -> None:
    for item in items:
        item.add_marker(pytest.mark.skip(reason=reason))
