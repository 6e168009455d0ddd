"""The same bits at every world size: weights, optimizer state, losses and norms."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from reproducible_runs import (
    BATCH,
    SLOTS,
    Run,
    differences,
    digests,
    loss_of,
    make_model,
    mesh_of,
    samples,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import polyshard_optimizers
from polyshard.errors import NonFiniteError
from polyshard.transport.gloo import GlooReduce
from polyshard_checkpoint import Checkpoints, TrainingState
from polyshard_reproducible import SlotSampler
from polyshard_reproducible.randomness import seed_of
from polyshard_resilience import NonFinite
from polyshard_resilience.errors import SkippedStepWarning
from polyshard_testing import World

STEPS = 4
SHAPES: dict[int, list[tuple[int, ...]]] = {2: [(2,), (2, 1)], 4: [(4,), (2, 2)]}

Digests = dict[str, str]


def trained(rank: int, size: int, shape: tuple[int, ...], given: dict[str, Any]) -> Digests:
    """What a run leaves behind."""
    return Run(shape, **given).train(range(STEPS)).state()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("given", [{}, {"dtype": torch.bfloat16}], ids=["fp32", "bf16"])
def test_every_mesh_gives_the_same_bits(
    world1: World, world2: World, world4: World, given: dict[str, Any]
) -> None:
    expected = world1.run(trained, (1,), given)[0]
    assert len(expected) > 50
    for world in (world2, world4):
        for shape in SHAPES[world.size]:
            for found in world.run(trained, shape, given):
                assert differences(found, expected) == [], shape


def trained_packed(rank: int, size: int, shape: tuple[int, ...]) -> Digests:
    """Where the transport cannot make the plugin's sums."""
    with patch.object(GlooReduce, "in_tree", lambda route: None):
        return trained(rank, size, shape, {})


def test_sums_of_the_codec_are_those_of_the_transport(
    world1: World, world2: World, world4: World
) -> None:
    expected = world1.run(trained, (1,), {})[0]
    for world in (world2, world4):
        for shape in SHAPES[world.size]:
            for found in world.run(trained_packed, shape):
                assert differences(found, expected) == [], shape


def trained_by_torch(rank: int, size: int) -> Digests:
    """The same slots, random numbers and means, summed by torch."""
    model = make_model(mesh_of((size,)), torch_fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler, data = SlotSampler(100, BATCH, SLOTS, seed=1), samples()
    turns = SLOTS // size
    for step in range(STEPS):
        for turn in range(turns):
            torch.manual_seed(seed_of(3, step, slot := turn * size + rank))
            (loss_of(model, data[sampler.indices(step, slot)]) / turns).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return digests(model, optimizer, [])


def test_torch_gives_other_bits(world1: World, world2: World, world4: World) -> None:
    found = [world.run(trained_by_torch)[0] for world in (world1, world2, world4)]
    for one, other in ((0, 1), (1, 2), (0, 2)):  # of a few small vectors all bits may agree
        assert len(differences(found[one], found[other])) > len(found[0]) // 2


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "foreach": lambda p, **k: torch.optim.AdamW(p, foreach=True, amsgrad=True, **k),
    "flat": lambda p, **k: polyshard_optimizers.flat(torch.optim.AdamW(p, **k)),
    "sgd": lambda p, **k: torch.optim.SGD(p, momentum=0.9, weight_decay=0.1, **k),
}


def trained_by(rank: int, size: int) -> dict[str, Digests]:
    """A run with each optimizer; two steps."""
    return {
        name: Run((size,), optimizer).train(range(2)).state()
        for name, optimizer in OPTIMIZERS.items()
    }


@pytest.mark.thorough
def test_optimizers_give_the_same_bits(world1: World, world2: World, world4: World) -> None:
    expected = world1.run(trained_by)[0]
    for found in (*world2.run(trained_by), *world4.run(trained_by)):
        assert {name: differences(found[name], expected[name]) for name in found} == {
            name: [] for name in OPTIMIZERS
        }


BAD = {(1, 5): float("inf"), (2, 0): float("nan"), (2, 6): 1e38}
"""Losses of two of four steps; a slot's gradient is large, and sums of it overflow."""


def guarded(rank: int, size: int, shape: tuple[int, ...], action: Any) -> tuple[Digests, int]:
    """What is left of a run whose guard leaves steps out, and how many."""
    run = Run(shape)
    run.factors = BAD
    guard = NonFinite(run.optimizer, action, model=run.model)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", SkippedStepWarning)
        run.train(range(4))
    assert sum(w.category is SkippedStepWarning for w in seen) == guard.skipped
    return digests(run.model, run.optimizer, []), guard.skipped


def left_out(rank: int, size: int) -> Digests:
    """The same run without these steps; nothing guards it."""
    run = Run((1,)).train(range(1)).train(range(3, 4))
    return digests(run.model, run.optimizer, [])


def test_guards_leave_out_the_same_steps(world1: World, world2: World, world4: World) -> None:
    expected = world1.run(left_out)[0]
    for world, shape in ((world1, (1,)), (world2, (2,)), (world4, (4,)), (world4, (2, 2))):
        for found, skipped in world.run(guarded, shape, "skip"):
            assert skipped == 2
            assert differences(found, expected) == [], shape


def stopped(rank: int, size: int) -> tuple[Digests, list[str]]:
    """Where a guard stops a run, and which gradients it names."""
    run = Run((size,))
    run.factors = {(1, 5): float("nan")}
    NonFinite(run.optimizer, model=run.model)
    with pytest.raises(NonFiniteError) as caught:
        run.train(range(3))
    return digests(run.model, run.optimizer, []), re.findall(r"'([\w.]+)'", str(caught.value))


def test_guards_stop_at_the_same_step(world1: World, world2: World) -> None:
    (expected, names), *_ = world1.run(stopped)
    assert "embedding.weight" in names
    for found, named in world2.run(stopped):
        assert named == names
        assert differences(found, expected) == []


def resumed(rank: int, size: int, folder: str, steps: range) -> Digests:
    """Continue from what another number of ranks has saved, and save; noise in between."""
    run = Run((size,))
    state = TrainingState(run.model, [run.optimizer])
    checkpoints = Checkpoints(folder)
    restored = checkpoints.load(state)
    assert (restored.step if restored is not None else 0) == steps.start
    torch.rand(rank + 1)
    run.train(steps)
    checkpoints.save(steps.stop, state)
    return digests(run.model, run.optimizer, [])


@pytest.mark.filterwarnings("ignore")
def test_a_run_goes_on_at_other_world_sizes(
    world1: World, world2: World, world4: World, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoints")
    world4.run(resumed, folder, range(2))
    world2.run(resumed, folder, range(2, 3))
    found = world4.run(resumed, folder, range(3, 5))
    expected = world1.run(resumed, str(tmp_path / "other"), range(5))[0]
    for each in found:
        assert differences(each, expected) == []


def trained_once(rank: int, size: int, shape: tuple[int, ...]) -> Digests:
    """A shorter run: eight ranks share few cores."""
    return Run(shape).train(range(2)).state()


@pytest.mark.thorough
def test_eight_ranks(world1: World) -> None:
    expected = world1.run(trained_once, (1,))[0]
    world = World(8)
    try:
        for shape in ((8,), (4, 2)):
            for found in world.run(trained_once, shape):
                assert differences(found, expected) == []
    finally:
        world.close()
