"""The demonstration gives the same bits at every world size, through changes of it as well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("polyshard_demo")
import torch
from reproducible_demo import demo, disturbed, state_of, trained
from reproducible_runs import differences
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyshard.errors import NonFiniteError
from polyshard_cli.plan.errors import PlanError
from polyshard_demo.engine import plugins_of
from polyshard_demo.settings import AUTO, Settings
from polyshard_reproducible import compare
from polyshard_resilience import NonFinite
from polyshard_testing import World

Digests = dict[str, str]
STEPS = 50


@pytest.fixture(scope="module")
def world8() -> Iterator[World]:
    world = World(8, collective_seconds=120)
    yield world
    world.close()


def check(world: World, shard_ranks: int, expected: Digests, out: Path, **options: Any) -> None:
    """A whole run leaves behind what is expected, on every rank."""
    given = {**options, "shard_ranks": shard_ranks}
    for found in world.run(trained, f"{out}-{world.size}-{shard_ranks}", given, timeout=None):
        assert differences(found, expected) == []


def test_a_few_steps_give_the_same_bits(
    world1: World, world2: World, world4: World, tmp_path: Path
) -> None:
    given = {"steps": 4, "guards": True}
    expected = world1.run(trained, str(tmp_path / "one"), given)[0]
    assert len(expected) == 21 * 4 + 4 + 2  # parameters, their state, steps, evaluations
    check(world2, 0, expected, tmp_path / "a", **given)
    check(world4, 2, expected, tmp_path / "b", **given)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("given", [{}, {"tied": True, "bf16": True}], ids=["fp32", "bf16"])
def test_fifty_steps_give_the_same_bits(
    world1: World, world2: World, world4: World, world8: World, tmp_path: Path, given: Any
) -> None:
    expected = world1.run(trained, str(tmp_path / "one"), {"steps": STEPS, **given})[0]
    shapes = ((world2, (0, 1)), (world4, (0, 2)), (world8, (0, 4, 2)))
    for world, shards in shapes:
        for shard_ranks in shards:
            check(world, shard_ranks, expected, tmp_path / "run", steps=STEPS, **given)


@pytest.mark.thorough
def test_torch_gives_other_bits(
    world1: World, world2: World, world4: World, tmp_path: Path
) -> None:
    """Of the same job, with the same rows in each step."""
    given = {"engine": "torch", "reproducible": 0, "dropout": 0.0, "steps": 3}
    worlds = (world1, world2, world4)
    found = [w.run(trained, str(tmp_path / str(w.size)), given)[0] for w in worlds]
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert len(differences(found[one], found[other])) > len(found[0]) // 2


class StoppedError(Exception):
    """A run is ended from outside."""


def trained_until(rank: int, size: int, out: str, stop: int, given: dict[str, Any]) -> Digests:
    """Start in ``out``, or continue there; ended when step ``stop`` has begun."""

    def end(step: int, slot: int) -> None:
        if step == stop:
            raise StoppedError

    torch.rand(rank + 1)  # generators are not where the run has left them
    trainer = disturbed(demo(rank, size, out, resume=AUTO, **given), before=end)
    try:
        trainer.run()
    except StoppedError:
        assert trainer.history.last == stop - 1
    return state_of(trainer)


def check_changes(worlds: list[tuple[World, int, int]], one: World, out: Path, steps: int) -> None:
    """Worlds, with shard ranks and the step in which they are stopped, make an undisturbed run."""
    given = {"steps": steps, "checkpoint_every": 2}
    records = {name: out / f"{name}-records" for name in ("whole", "parts")}
    whole = given | {"record": records["whole"]}
    expected = one.run(trained, str(out / "whole"), whole, timeout=None)[0]
    found: list[Digests] = []
    for world, shard_ranks, stop in worlds:
        part = given | {"record": records["parts"], "shard_ranks": shard_ranks}
        found = world.run(trained_until, str(out / "parts"), stop, part, timeout=None)
    for each in found:
        assert differences(each, expected) == []
    compared = compare(records["whole"], records["parts"])
    assert compared.first is None
    assert compared.steps == (*range(1, steps + 1), steps + 1)  # the last weights too


@pytest.mark.thorough
def test_a_run_goes_on_at_other_world_sizes(
    world1: World, world2: World, world4: World, tmp_path: Path
) -> None:
    """Stopped after steps 3 and 5; saved after 2 and 4."""
    worlds = [(world4, 0, 4), (world2, 0, 6), (world4, 2, 0)]
    check_changes(worlds, world1, tmp_path, 6)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_fifty_steps_on_four_two_and_eight_ranks(
    world1: World, world2: World, world4: World, world8: World, tmp_path: Path
) -> None:
    worlds = [(world4, 0, 18), (world2, 1, 36), (world8, 4, 0)]
    check_changes(worlds, world1, tmp_path, STEPS)


FLIPPED = "blocks.1.feed_forward.up.weight"
FLIPPED_AT = 17


def recorded(rank: int, size: int, folder: str, flips: bool) -> None:
    """A recorded run; one bit of a gradient may flip on the last rank."""

    def flip(step: int, slot: int) -> None:
        gradient = trainer.built.model.get_parameter(FLIPPED).grad  # there after the last slot
        if (step, rank) == (FLIPPED_AT, size - 1) and flips and gradient is not None:
            assert isinstance(gradient, DTensor)
            gradient.to_local().view(torch.int32)[3, 5] ^= 1

    small = {"reproducible": 2, "batch": 2, "steps": FLIPPED_AT + 1, "eval_every": 0}
    trainer = demo(rank, size, f"{folder}/run", record=Path(folder), **small)
    disturbed(trainer, after=flip).run()


@pytest.mark.thorough
def test_a_flipped_bit_is_found(world1: World, world2: World, tmp_path: Path) -> None:
    one, flipped = (str(tmp_path / name) for name in ("one", "flipped"))
    world1.run(recorded, one, False)
    world2.run(recorded, flipped, True)
    first = compare(one, flipped).first  # so that the sixteen steps before it are equal
    assert first is not None
    assert (first.step, *first.key) == (FLIPPED_AT, "gradients", "blocks.1", FLIPPED, None)


POISONED = (2, 5)
"""Step and slot in which a gradient is infinite, but no loss."""


def poisoned(rank: int, size: int, out: str, skips: bool) -> tuple[Digests, int]:
    """Weights and numbers after a step that is not to be made, and steps that were not."""
    now: list[tuple[int, int]] = []
    trainer = demo(rank, size, out, steps=3, eval_every=0, guards=not skips)
    built = trainer.built
    guard = NonFinite(built.optimizer, "skip", model=built.model) if skips else None

    def poison(module: nn.Module, args: Any, output: Tensor) -> None:
        if module.training and now[-1] == POISONED:
            output.register_hook(lambda gradient: gradient * torch.inf)

    trainer.built.model.get_submodule("blocks.1.feed_forward.up").register_forward_hook(poison)
    trainer = disturbed(trainer, before=lambda step, slot: now.append((step, slot)))
    if guard is not None:
        trainer.run()
        return state_of(trainer), guard.skipped
    with pytest.raises(NonFiniteError, match=r"'blocks\.0\.attention\.query\.weight'"):
        trainer.run()
    return state_of(trainer), trainer.history.last


@pytest.mark.sampled(2)
@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_steps_are_left_out_at_every_world_size(
    world1: World, world2: World, world4: World, tmp_path: Path, skips: bool
) -> None:
    expected = world1.run(poisoned, str(tmp_path / "one"), skips)[0]
    assert expected[1] == 1
    for world in (world2, world4):
        for found in world.run(poisoned, str(tmp_path / str(world.size)), skips):
            assert found[1] == 1
            assert differences(found[0], expected[0]) == []


def test_slots_that_are_no_tree_are_refused() -> None:
    asked = Settings(out=Path("run"), reproducible=6, batch=6)
    with pytest.raises(PlanError, match="--reproducible 6: Reproducible: slots must be a power of"):
        plugins_of(asked)
