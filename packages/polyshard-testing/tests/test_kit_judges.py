"""The kit is right about right plugins and about wrong ones, seam by seam."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from samples import (
    adapters,
    around,
    backends,
    constraints,
    gather,
    observers,
    reduce,
    short,
    storage,
    transforms,
)
from samples.verdict import Right, Samples, Wrong

from polyshard.errors import PolyshardError
from polyshard.plugins.stack import build_stack
from polyshard_testing import PluginConformance, World
from polyshard_testing.runs import plugins_of

SEAMS: dict[str, Samples] = {
    module.__name__.rpartition(".")[2]: module.SAMPLES
    for module in (
        *(gather, reduce, short, storage, transforms, adapters, backends, constraints),
        *(observers, around),
    )
}
RIGHT = [(seam, sample) for seam, samples in SEAMS.items() for sample in samples.right]
WRONG = [(seam, sample) for seam, samples in SEAMS.items() for sample in samples.wrong]


def kit_for(sample: Right | Wrong) -> PluginConformance:
    kit = PluginConformance()
    kit.tolerance = sample.tolerance
    kit.loss_tolerance = sample.loss_tolerance if isinstance(sample, Right) else None
    return kit


def calls_of(kit: PluginConformance, name: str, world: World, sample: Any) -> Iterator[Any]:
    """Calls that pytest would make of one test, by its fixtures and parameters."""
    test = getattr(kit, name)
    given: dict[str, Callable[[], object]] = {
        "factory": lambda: sample.factory,
        "stack": lambda: build_stack(plugins_of(sample.factory)),
        "world2": lambda: world,
    }
    marks = [m for m in getattr(test, "pytestmark", ()) if m.name == "parametrize"]
    names = [n for n in inspect.signature(test).parameters if n in given]
    for values in marks[0].args[1] if marks else [None]:
        more = {marks[0].args[0]: values} if marks else {}
        yield lambda more=more: test(**{n: given[n]() for n in names}, **more)


def labels(samples: list[tuple[str, Any]]) -> list[str]:
    return [f"{seam}-{sample.factory.__name__}" for seam, sample in samples]


@pytest.mark.sampled(14)  # each goes through the whole kit
@pytest.mark.parametrize(("seam", "sample"), RIGHT, ids=labels(RIGHT))
def test_right_plugins_pass(seam: str, sample: Right, world2: World) -> None:
    kit = kit_for(sample)
    ran = 0
    for name in (n for n in dir(kit) if n.startswith("test_")):
        if name == "test_order_on_a_device":  # polyshard-sim's tests judge it, with samples there
            continue
        for call in calls_of(kit, name, world2, sample):
            try:
                call()
                ran += 1
            except pytest.skip.Exception:
                continue
    assert ran >= 10, seam


@pytest.mark.parametrize(("seam", "sample"), WRONG, ids=labels(WRONG))
def test_wrong_plugins_fail_where_they_are_wrong(seam: str, sample: Wrong, world2: World) -> None:
    def judge() -> None:
        for call in calls_of(kit_for(sample), sample.found_by, world2, sample):
            call()

    with pytest.raises((AssertionError, PolyshardError, OSError)) as caught:
        judge()
    # A mistake in the sample itself would be found as well, and prove nothing.
    assert not any(name in str(caught.value) for name in ("NameError", "ModuleNotFoundError")), seam


def test_every_seam_has_enough_samples() -> None:
    for seam, samples in SEAMS.items():
        assert len(samples.right) >= 3, seam
        assert len(samples.wrong) >= 5, seam
