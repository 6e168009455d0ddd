"""Copies between device and host are ordered, and are not without any one wait or keep-alive."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from offload_steps import STEPS, races_of

from polyshard_testing.streams.mutants import Mutant, Survival, mutants


@pytest.mark.sampled(3)
@pytest.mark.parametrize("run", STEPS, ids=lambda run: run.__name__)
def test_a_step_is_ordered(run: Any, tmp_path: Path) -> None:
    assert races_of(run, tmp_path) == []


OWN = (
    "polyshard_offload.shards.host_storage",
    "polyshard_offload.shards.disk_storage",
    "polyshard_offload.shards.gradients",
    "polyshard_offload.shards.staging",
    "polyshard_offload.shards.storage",
    "polyshard_offload.tiers.swap_file",
)
CORE = (
    "polyshard.memory.streams",
    "polyshard.program.executor",
    "polyshard.program.reduce",
    "polyshard.group.group",
    "polyshard.engine.unit",
)
HOST_MEMORY = ("settle", "synchronize", "ENTRY", "kept += (frame.total", "_take_held")
"""In statements of core, or names of functions, for shards and gradients on the host."""

MUTANTS = [
    *mutants(OWN),
    *(m for m in mutants(CORE) if any(word in f"{m.function} {m.text}" for word in HOST_MEMORY)),
]


@pytest.fixture(scope="module")
def survival(tmp_path_factory: pytest.TempPathFactory) -> Survival:
    path = tmp_path_factory.mktemp("tiers")
    return Survival({run.__name__: partial(races_of, run, path) for run in STEPS})


BY_THE_OPTIMIZER = "a thread and a file, no stream: what an optimizer opened in host memory"
NAMED_ALIKE = "orders nothing: only the name is alike"
REUSED = "seen only if the allocator gives the same memory out again while the copy is under way"
ELSEWHERE = {
    ("DiskStorage.open", "opening.result()"): BY_THE_OPTIMIZER,
    ("DiskStorage._give_back", "opening.exception()"): BY_THE_OPTIMIZER,
    ("DiskStorage._wait_written", "going.result()"): BY_THE_OPTIMIZER,
    ("DiskStorage.hold", "super().hold(parameters)"): NAMED_ALIKE,
    (
        "DiskStorage.hold",
        "self._checksums.hold(parameters, self._shard, None if fresh is None else fresh.cpu())",
    ): NAMED_ALIKE,
    ("TierStorage.hold", "self.norms.hold(parameters, self._shard)"): NAMED_ALIKE,
    ("TierStorage.place_gradient", "self.norms.record(gradient, placed)"): NAMED_ALIKE,
    ("StagingState.copy", "self.copied.append(host)"): REUSED,
    ("_keep_sum", "frame.kept += (frame.total,)"): REUSED,
}
"""Mutants that no step of this test fails, and why."""


@pytest.mark.sampled(16)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.function}-{m.kind}-{m.line}")
def test_without_it_a_step_is_disordered(mutant: Mutant, survival: Survival) -> None:
    if (mutant.function, mutant.text) not in ELSEWHERE:
        assert survival.end_of(mutant) is not None, f"nothing fails with {mutant}"
