"""Matrices that tensor parallelism divides, against one process that has them whole."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from matrix_models import Shampoo, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import polyshard
from polyshard.errors import IneffectiveSettingWarning, UnsupportedError
from polyshard.plugins.seams import GradientLanding, GroupInfo
from polyshard.transport.collective_owners import CollectiveOwner
from polyshard_checkpoint import Checkpoints, TrainingState
from polyshard_optimizers import MatrixOptimizer
from polyshard_optimizers.matrix import parts as parts_module
from polyshard_optimizers.matrix.parts import Parts
from polyshard_testing import World, ranks

pytest.importorskip("polyshard_tensor_parallel", reason="needs polyshard-tensor-parallel")
from divided_models import Divided, DividedRun, heads, reference

MESHES = {"dp-tp": (2, 2), "replicas-dp-tp": (2, 1, 2)}
KINDS: dict[str, Any] = {"muon": torch.optim.Muon, "shampoo": Shampoo}


def mesh_of(*shape: int) -> Any:
    return init_device_mesh(
        torch.get_default_device().type,
        shape,
        mesh_dim_names=("replicas", "dp", "tp")[-len(shape) :],
    )


def plugin(kind: str = "muon", **kwargs: Any) -> MatrixOptimizer:
    return MatrixOptimizer(KINDS[kind], blocks=heads, **{"lr": 0.02, **kwargs})


@pytest.mark.parametrize("shape", MESHES.values(), ids=list(MESHES))
@ranks(4)
def test_steps_are_those_of_one_process(rank: int, size: int, shape: tuple[int, ...]) -> None:
    run = DividedRun(mesh_of(*shape), plugin(weight_decay=0.1))
    run.train(5, parts=2)
    settings = {"lr": 0.02, "weight_decay": 0.1}
    run.check(reference(math.prod(shape[:-1]), parts=2, settings=settings).train(5).model)


@ranks(4)
def test_norms_count_every_part_once(rank: int, size: int) -> None:
    run, whole = DividedRun(mesh_of(2, 2), plugin()), reference(2, clip=0.05)
    norms = run.train(3, clip=0.05)
    run.check(whole.train(3).model)
    torch.testing.assert_close(norms, whole.norms, rtol=1e-9, atol=0)


@ranks(4)
def test_any_class_has_parts_of_weights_put_together(rank: int, size: int) -> None:
    run = DividedRun(mesh_of(2, 2), plugin("shampoo"))
    run.train(3)
    run.check(reference(2, made_by=Shampoo, settings={"lr": 0.02}).train(3).model)


@ranks(4)
def test_each_matrix_is_made_once(rank: int, size: int) -> None:
    run = DividedRun(mesh_of(2, 2), plugin())
    run.train(1)
    made = {m.site.name: m.cut.count for m in run.optimizer._matrices.values() if m.site.makes}
    kept = {n for m in run.optimizer._matrices.values() if m.state for n in [m.site.name]}
    assert kept == set(made)
    every: list[Any] = [None] * size
    torch.distributed.all_gather_object(every, made)
    counts: Counter[str] = sum((Counter(one) for one in every), Counter())
    for name, count in counts.items():
        if "experts" in name:
            assert count == 4, "in rows: the places of tensor parallelism hold the same"
        else:
            assert count == {"whole_heads": 4, "cut_heads": 3}.get(name.split(".")[2], 1), name
    assert all(len(one) >= 4 for one in every), "work is everybody's"


@ranks(4)
def test_steps_in_fp32_from_gradients_that_are_equal(rank: int, size: int) -> None:
    """Gradients are made of weights, so no sum is in another order; they are put there in rows."""
    run = DividedRun(mesh_of(2, 2), plugin(), torch.float32)
    whole = reference(1, build=partial(Divided, torch.float32))
    chosen = {id(p) for p in run.plugin._chosen(run.model)}
    named = dict(whole.model.named_parameters())
    for _ in range(20):
        for name, p in run.model.named_parameters():
            if id(p) in chosen:
                p.grad = torch.sin(p.detach() * 7)
                for matrix in whole.matrices[name]:
                    matrix.grad = torch.sin(matrix.detach() * 7)
        run.optimizer.step()
        whole.optimizer.step()
    for name, p in run.model.named_parameters():
        if id(p) in chosen:
            expected = torch.cat([*whole.matrices[name]]).view(named[name].shape).detach()
            torch.testing.assert_close(p.full_tensor(), expected, rtol=0, atol=1e-6)


def save(rank: int, size: int, kind: str, folder: Path) -> None:
    run = DividedRun(mesh_of(2, 2), plugin(kind))
    run.part = 0  # all ranks have the same batches, whatever their number
    run.train(2)
    state = TrainingState(run.model, [run.optimizer, run.rest], random=False)
    Checkpoints(folder).save(2, state)


def go_on(rank: int, size: int, kind: str, folder: Path) -> None:
    mesh = (
        mesh_of(1, 2)
        if size == 2
        else init_device_mesh(torch.get_default_device().type, (3,), mesh_dim_names=("dp",))
    )
    run = DividedRun(mesh, plugin(kind))
    run.part = 0
    Checkpoints(folder).load(TrainingState(run.model, [run.optimizer, run.rest], random=False))
    run.train(2, 2)
    run.check(reference(1, made_by=KINDS[kind]).train(4).model)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_state_moves_to_other_axes(
    world2: World, world3: World, world4: World, tmp_path: Path, kind: str
) -> None:
    world4.run(save, kind, tmp_path)
    world2.run(go_on, kind, tmp_path)
    world3.run(go_on, kind, tmp_path)


PLACEMENTS = (
    (Shard(0), Shard(1)),
    (Shard(0), Shard(0)),
    (Shard(1), Replicate()),
    (Replicate(), Shard(0)),
    (Replicate(), Replicate()),
)


def by_collectives(group: dist.ProcessGroup, *given: Any) -> CollectiveOwner:
    return CollectiveOwner(group, torch.float32)


@pytest.mark.parametrize("by", ["the transport", "collectives"])
@pytest.mark.parametrize("shape", [(7, 5), (1, 3), (0, 4), (6, 2, 3)], ids=str)
@ranks(4)
def test_parts_over_several_axes(rank: int, size: int, shape: tuple[int, ...], by: str) -> None:
    ways: dict[str, AbstractContextManager[Any]] = {
        "the transport": nullcontext(),
        "collectives": patch.object(parts_module, "owner_route_over", by_collectives),
    }
    with ways[by]:
        check_parts(rank, size, shape)


def check_parts(rank: int, size: int, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (1, 2, 2), mesh_dim_names=("dp", "a", "b")
    )
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    for placements in PLACEMENTS:
        given: Any = distribute_tensor(whole, mesh, (Replicate(), *placements))
        local = given.to_local()
        parts = Parts(given, 1, "w")
        assert parts.shapes[-1] == tuple(local.shape)
        for place in range(size):
            leads = parts.leads(place)
            found = parts.gather(local, leads)
            assert (found is not None) == (place == rank)
            assert found is None or torch.equal(found, whole)
            doubled = None if found is None else 2 * found
            back, leaving = parts.scatter(doubled, leads, local.new_empty(0))
            for pending in leaving:
                pending.wait()
            assert torch.equal(back, 2 * local)


@ranks(4)
def test_blocks_that_parts_keep(rank: int, size: int) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (1, 2, 2), mesh_dim_names=("dp", "a", "b")
    )
    cases = ((8, 2, True), (8, 4, False), (6, 3, False), (12, 3, True), (5, 1, True), (6, 4, False))
    for extent, rows, kept in cases:
        given: Any = distribute_tensor(torch.zeros(extent, 2), mesh, (Replicate(), *PLACEMENTS[1]))
        parts = Parts(given, 1, "w")
        assert parts.keep_together(rows) is kept, (extent, rows)
    given = distribute_tensor(torch.arange(9.0).view(9, 1), mesh, (Replicate(), *PLACEMENTS[1]))
    assert not len(given.to_local()) or Parts(given, 1, "w").offset() == int(given.to_local()[0])


@ranks(4)
def test_ranks_compare_who_makes_what(rank: int, size: int) -> None:
    def otherwise(name: str, shape: tuple[int, ...]) -> int:
        return 2 if rank % 2 and "up" in name else heads(name, shape)

    with pytest.raises(polyshard.errors.PlanMismatchError, match=r"blocks\.0\.up\.weight"):
        DividedRun(mesh_of(2, 2), MatrixOptimizer(torch.optim.Muon, blocks=otherwise))


@ranks(4)
def test_updates_begin_where_nothing_is_put_together(rank: int, size: int) -> None:
    with pytest.warns(IneffectiveSettingWarning, match=r"early=True.*blocks\.0\.up\.weight"):
        run = DividedRun(mesh_of(2, 2), plugin(early=True))
    run.backward(0)
    begun = {m.site.name for m in run.optimizer._matrices.values() if m.begun is not None}
    assert {name.split(".")[2] for name in begun} <= {"plain", "whole_heads"}
    every: list[Any] = [None] * size
    torch.distributed.all_gather_object(every, begun)
    assert len(set().union(*every)) == 4
    run.optimizer.step()
    run.rest.step()
    run.train(2, 1)
    run.check(reference(2).train(3).model)


@ranks(4)
def test_a_landing_that_takes_no_parts_refuses_them(rank: int, size: int) -> None:
    class Whole(MatrixOptimizer):
        @polyshard.hookimpl
        def polyshard_gradient_landing(self, group: GroupInfo) -> GradientLanding | None:
            landing: Any = super().polyshard_gradient_landing(group)
            if landing is not None:
                landing.takes_parts = False
            return landing  # type: ignore[no-any-return]

    with pytest.raises(UnsupportedError, match=r"other axes.*divide .*up\.weight"):
        DividedRun(mesh_of(2, 2), Whole(torch.optim.Muon, lr=0.02))


@ranks(4)
def test_gradients_that_are_not_finite_stop_all(rank: int, size: int) -> None:
    run = DividedRun(mesh_of(2, 2), plugin())
    chosen = run.plugin._chosen(run.model)
    before: list[Any] = [p.full_tensor() for p in chosen]  # type: ignore[attr-defined]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(run.model, 0, run.part)).backward()
    part = run.model.blocks[0].up.weight.grad.to_local().whole
    if part.numel() and rank % 2:
        part[0, 0] = math.inf  # on one place beside the owner alone
    scaler.step(run.optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert not any(m.state for m in run.optimizer._matrices.values())
    for p, value in zip(chosen, before, strict=True):
        assert torch.equal(p.full_tensor(), value), "no step was made"  # type: ignore[attr-defined]
