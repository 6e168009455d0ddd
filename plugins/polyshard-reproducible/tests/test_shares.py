"""Replica groups share slots, as many as are there: the bits are those of one rank."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reproducible_runs import SLOTS, Run, differences
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from polyshard_reproducible import Recorder, ReproducibleError
from polyshard_testing import World

STEPS = 5


@dataclass(frozen=True)
class Peers:
    """Groups of a step; a rank sums with those of its number in the others."""

    rank: int
    size: int
    group: Any

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)


def shared(
    rank: int, size: int, shape: tuple[int, ...], present: tuple[int, ...], factor: float = 1.0
) -> Any:
    """Groups of ``shape[1:]``; ``present[step]`` of them share a step, others make all of it."""
    axes = ("shards",) if len(shape) == 2 else ("replicas", "shards")
    inner = init_device_mesh(
        torch.get_default_device().type, shape, mesh_dim_names=("groups", *axes)
    )[axes]
    per_group = size // shape[0]
    number = rank // per_group
    peers = {}
    for k in sorted(set(present)):
        for own in range(per_group):
            made = dist.new_group([g * per_group + own for g in range(k)])
            if own == rank % per_group:
                peers[k] = made
    run = Run(inner)
    run.factors = factors(factor)
    turns: list[int] = []

    def replicas(step: int) -> Peers | None:
        k = present[step]
        return Peers(number, k, peers[k]) if number < k else None

    run.replicas = replicas
    run.after_backward = turns.append
    return run.train(range(STEPS)).state(), turns


def alone(rank: int, size: int, factor: float = 1.0) -> dict[str, str]:
    run = Run((1,))
    run.factors = factors(factor)
    return run.train(range(STEPS)).state()


def factors(factor: float) -> dict[tuple[int, int], float]:
    return dict.fromkeys(itertools.product(range(STEPS), range(SLOTS)), factor)


SHAPES = {
    "groups of two": ((2, 2), (2, 1, 2, 2, 1)),
    "groups of one, and spares": ((4, 1), (4, 3, 1, 2, 4)),
    "groups of two replicas": ((2, 2, 1), (2, 2, 1, 2, 2)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_any_number_of_groups_gives_the_bits_of_one_rank(
    world1: World, world4: World, name: str
) -> None:
    shape, present = SHAPES[name]
    expected = world1.run(alone)[0]
    assert len(expected) > 50
    for found, _ in world4.run(shared, shape, present):
        assert differences(found, expected) == []


def test_slots_are_divided(world4: World) -> None:
    """8 slots: 2 groups of 2 ranks run 2 each a rank, a group alone 4."""
    for rank, (_, turns) in enumerate(world4.run(shared, (2, 2), (2, 1, 2, 2, 2))):
        assert [turns.count(step) for step in range(STEPS)] == [2, 4, 2, 2, 2], rank


def misused(rank: int, size: int, folder: str) -> tuple[str, str]:
    run = Run((size,))
    with pytest.raises(ReproducibleError, match="replica group 2 of 2") as counted:
        next(iter(run.plugin.each_slot(run.model, step=0, replicas=Peers(2, 2, None))))
    with (
        Recorder(folder, run.plugin, run.model, run.optimizer),
        pytest.raises(ReproducibleError, match="cannot be recorded") as recorded,
    ):
        next(iter(run.plugin.each_slot(run.model, step=0, replicas=Peers(0, 1, None))))
    return str(counted.value), str(recorded.value)


def test_misuse_is_refused(world2: World, tmp_path: Any) -> None:
    first, second = world2.run(misused, str(tmp_path))
    assert first == second


TINY = 1e-39
"""Of losses whose gradients are subnormal: dividing them before they are summed loses bits."""


def test_nothing_is_rounded_before_sums_are_whole(world1: World, world4: World) -> None:
    expected = world1.run(alone, TINY)[0]
    for found, _ in world4.run(shared, (2, 2), (2, 1, 2, 2, 1), TINY):
        assert differences(found, expected) == []
