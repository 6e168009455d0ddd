"""No wait, event or keep-alive is for nothing: without any one of them a step is disordered."""

from __future__ import annotations

from functools import partial

import pytest
from toy_steps import STEPS, races_of

from polyshard_testing.streams.mutants import Mutant, Survival, mutants

MODULES = (
    "polyshard.memory.streams",
    "polyshard.transport.collective",
    "polyshard.transport.custom",
    "polyshard.transport.wrapped",
    "polyshard.program.executor",
    "polyshard.program.unshard",
    "polyshard.program.reduce",
    "polyshard.group.group",
    "polyshard.engine.unit",
    "polyshard.engine.hooks",
    "polyshard.engine.step",
    "polyshard.module.communication",
    "polyshard.module.sharded",
)

FOR_GLOO = "a message of gloo: transport/test_gloo_waits.py leaves this out"
FOR_LANDINGS = "no step here has gradients that land whole: the recording device reduces none"
FOR_VALUES = "what is copied in the wait would be missing: transport/test_gloo_waits.py sees it"
FOR_STORAGES = "no storage here is on the host: a plugin's test leaves this out (polyshard-offload)"
FOR_HOST_MEMORY = "host memory is a plugin's: its own test leaves this out (polyshard-offload)"
FOR_FINALIZATION = "no step here ends by hand: engine/test_finalization.py has gradients that do"
ELSEWHERE = {
    ("Reducer._tell", "frame.said.works.wait()"): FOR_GLOO,
    ("Reducer._land", "pending.wait()"): FOR_LANDINGS,
    ("Reducer._play_out", "pending.wait()"): FOR_GLOO,
    ("join", "pending.wait()"): FOR_VALUES,
    ("Reducer._join", "pending.wait()"): FOR_VALUES,
    ("Reducer._put", "self._storage.settle()"): FOR_HOST_MEMORY,
    ("_keep_sum", "frame.kept += (frame.total,)"): FOR_STORAGES,
    ("Reducer._take_held", "frame.kept += (earlier,)"): FOR_STORAGES,
    ("_run_from_home", "frame.events[ENTRY] = streams.mark()"): FOR_STORAGES,
    ("FSDPModule.finalize_backward", "finalize(unit)"): FOR_FINALIZATION,
    ("ParameterGroup.wait", "self.settle()"): FOR_HOST_MEMORY,
    ("ParameterGroup.settle", "self.shards.storage.settle()"): FOR_HOST_MEMORY,
    ("RootContext.end_forward", "self.settle()"): FOR_HOST_MEMORY,
    ("RootContext.settle", "group.settle()"): FOR_HOST_MEMORY,
    ("RootContext.end_backward", "self.settle()"): FOR_HOST_MEMORY,
}
"""Mutants that no step of this test fails, and why."""

MUTANTS = mutants(MODULES)
SAMPLE = 3
"""Every so many of them are run, unless all are."""


@pytest.fixture(scope="module")
def survival() -> Survival:
    return Survival({run.__name__: partial(races_of, run) for run in STEPS})


@pytest.mark.sampled(14)
@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, marks=[pytest.mark.thorough] if index % SAMPLE else [])
        for index, mutant in enumerate(MUTANTS)
    ],
    ids=lambda m: f"{m.function}-{m.kind}-{m.line}",
)
def test_without_it_a_step_is_disordered(mutant: Mutant, survival: Survival) -> None:
    if (mutant.function, mutant.text) not in ELSEWHERE:
        assert survival.end_of(mutant) is not None, f"nothing fails with {mutant}"


def test_the_list_of_exceptions_is_short_and_current() -> None:
    """Every one is a statement that is still there."""
    assert set(ELSEWHERE) <= {(mutant.function, mutant.text) for mutant in MUTANTS}
    assert len(MUTANTS) > 2 * len(ELSEWHERE)
