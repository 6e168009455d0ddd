"""Weights after steps on owners, against one process that sums the same gradients."""

from __future__ import annotations

import math
from threading import Event, get_ident
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matrix_models import WIDTH, Reference, Run, Shampoo, by_replicas, loss_of, muon, shampoo
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from toy_collectives import ByCollectives

import polyshard
import polyshard_resilience
from polyshard import clip_grad_norm_, fully_shard
from polyshard.errors import NonFiniteError, PeerError, UnsupportedError
from polyshard.plugins.seams import local_of
from polyshard_optimizers import MatrixError
from polyshard_resilience import NonFinite
from polyshard_resilience.errors import AttemptError, SkippedStepWarning
from polyshard_testing import raises_in_step, ranks
from polyshard_testing.streams import recorded

SLOW = {"lr": 0.002}
"""Where sums in another order differ in their last bits, which bf16 makes more of, by the rate."""


@pytest.mark.sampled(2)
@ranks(1, 2, 3, 4)
def test_twenty_muon_steps_are_those_of_one_process(rank: int, size: int) -> None:
    run = Run(init_device_mesh(torch.get_default_device().type, (size,)), muon(weight_decay=0.1))
    run.train(rank, 20)
    settings = {"lr": 0.02, "weight_decay": 0.1}
    run.check(Reference(size, settings=settings).train(20).model)


@pytest.mark.sampled(2)
@ranks(2, 3)
@pytest.mark.parametrize("made", [muon, shampoo])
def test_gradients_in_rows_give_the_same_bits(rank: int, size: int, made: Any) -> None:
    """Their sums are made in the same order, and the step gathers them."""
    runs = [
        Run(init_device_mesh(torch.get_default_device().type, (size,)), made(gradients=gradients))
        for gradients in ("whole", "rows")
    ]
    for run in runs:
        run.train(rank, 3, parts=2)
    for one, other in zip(*(run.model.parameters() for run in runs), strict=True):
        assert torch.equal(local_of(one), local_of(other))
    for parameter in runs[1].plugin._chosen(runs[1].model):
        gradient: Any = parameter.grad
        assert gradient.full_tensor().shape == parameter.shape  # rows, which others may read
    states = [run.optimizer.state_dict()["state"] for run in runs]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


@ranks(2)
def test_gradients_in_rows_come_too_late_to_begin_early(rank: int, size: int) -> None:
    with pytest.raises(MatrixError, match=r"early=True.*gradients='rows'"):
        muon(gradients="rows", early=True)
    with pytest.raises(MatrixError, match=r"'whole' or 'rows', not 'parts'"):
        muon(gradients="parts")


@ranks(4)
def test_one_owner_over_replicas_too(rank: int, size: int) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicas", "shards")
    )
    run = Run(mesh, muon())
    owners = {o for g in polyshard.describe(run.model).groups for o in g.owners if o is not None}
    assert owners == {0, 1, 2, 3}
    run.train(rank, 5)
    run.check(Reference(size, order=by_replicas).train(5).model)


@ranks(2)
def test_gradients_accumulate_before_and_after_they_land(rank: int, size: int) -> None:
    for sync in (False, True):
        run = Run(init_device_mesh(torch.get_default_device().type, (size,)), muon(**SLOW))
        run.train(rank, 3, parts=2, sync=sync)
        run.check(Reference(size, settings=SLOW, parts=2, synced=sync).train(3).model)


@ranks(4)
def test_replicas_may_sum_later(rank: int, size: int) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicas", "shards")
    )
    run = Run(mesh, muon())
    model: Any = run.model
    for part in range(2):
        model.set_requires_all_reduce(part == 1)
        loss_of(run.model, 0, rank * 2 + part).backward()
        landed = [p.grad is not None for p in run.plugin._chosen(run.model)]
        assert set(landed) == {part == 1}
    reference = Reference(size, parts=2)
    gradients = zip(*(reference.gradient(0, r) for r in range(size)), strict=True)
    norm = math.sqrt(sum(float((sum(g) / size).square().sum()) for g in gradients))
    assert float(clip_grad_norm_(run.model.parameters(), 1.0)) == pytest.approx(norm, rel=1e-4)


@ranks(2, 4)
def test_clipping_counts_landed_gradients_once(rank: int, size: int) -> None:
    shape = (size,) if size == 2 else (2, 2)
    mesh = init_device_mesh(
        torch.get_default_device().type, shape, mesh_dim_names=("r", "s")[-len(shape) :]
    )
    reference = Reference(size, settings=SLOW, clip=0.05, order=in_order(size))
    run = Run(mesh, muon(**SLOW))
    every = list(run.model.parameters())
    some = [p for p in every if p.numel()]  # torch has no largest element of nothing
    for clip in (clip_grad_norm_, nn.utils.clip_grad_norm_):
        for order in (2.0, math.inf, 1.0):
            run.backward(0, rank)
            each = zip(*(reference.gradient(0, r) for r in range(size)), strict=True)
            for p, parts in zip(reference.model.parameters(), each, strict=True):
                p.grad = reference.order(parts) / size if p.numel() else None
            expected = nn.utils.clip_grad_norm_(reference.model.parameters(), 0.05, order)
            found: Any = clip(every if clip is clip_grad_norm_ else some, 0.05, order)
            found = found.full_tensor() if hasattr(found, "full_tensor") else found
            torch.testing.assert_close(found, expected)
    norms = run.train(rank, 3, clip=0.05)
    run.check(reference.train(3, norms=norms).model)
    torch.testing.assert_close(torch.stack(norms), torch.tensor(reference.norms))


def in_order(size: int) -> Any:
    from matrix_models import in_turn

    return in_turn if size == 2 else by_replicas


@ranks(2)
def test_gradients_that_are_not_finite_are_seen_everywhere(rank: int, size: int) -> None:
    run = Run(init_device_mesh(torch.get_default_device().type, (size,)), muon())
    before = [p.full_tensor() for p in run.model.parameters()]  # type: ignore[attr-defined]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loss = loss_of(run.model, 0, rank) * (math.nan if rank else 1.0)
    scaler.scale(loss).backward()
    with pytest.raises(NonFiniteError):
        clip_grad_norm_(run.model.parameters(), 1.0, error_if_nonfinite=True)
    scaler.step(run.optimizer)
    scaler.step(run.rest)
    scaler.update()
    assert scaler.get_scale() < 4.0
    for p, value in zip(run.model.parameters(), before, strict=True):
        assert torch.equal(p.full_tensor(), value), "no step was made"  # type: ignore[attr-defined]


@ranks(1, 3)
def test_any_class_that_takes_matrices(rank: int, size: int) -> None:
    run = Run(init_device_mesh(torch.get_default_device().type, (size,)), shampoo(lr=0.05))
    run.train(rank, 5)
    reference = Reference(size, Shampoo, {"lr": 0.05}).train(5)
    run.check(reference.model, atol=1e-5)


@ranks(2)
def test_columns_may_be_what_is_sharded(rank: int, size: int) -> None:
    def dim(p: nn.Parameter) -> Shard:
        return Shard(p.ndim - 1)

    run = Run(
        init_device_mesh(torch.get_default_device().type, (size,)), muon(), shard_placement_fn=dim
    )
    run.train(rank, 3)
    run.check(Reference(size).train(3).model)


@ranks(2)
def test_updates_begin_when_gradients_have_landed(rank: int, size: int) -> None:
    run = Run(init_device_mesh(torch.get_default_device().type, (size,)), muon(early=True))
    run.train(rank, 3, parts=2)
    run.check(Reference(size, parts=2).train(3).model)
    run.backward(3, rank)
    clip_grad_norm_(run.model.parameters(), 1e-3)
    with raises_in_step(MatrixError, "was changed after its update had begun"):
        run.optimizer.step()


@ranks(2)
def test_a_rank_that_owns_no_matrix_is_told_that_one_was_changed(rank: int, size: int) -> None:
    """It would wait for an update that never comes."""
    polyshard_resilience.enable()
    plugin = muon(early=True)
    model: Any = fully_shard(nn.Linear(WIDTH, WIDTH, bias=False), plugins=[plugin])
    steps = plugin.optimizer(model)
    model(torch.ones(2, WIDTH)).square().sum().backward()
    clip_grad_norm_(model.parameters(), 1e-3)
    told = "was changed after its update had begun"
    with pytest.raises((MatrixError, PeerError), match=told) as caught:
        steps.step()
    kinds: list[Any] = [None] * size
    model.reset_iter_state()
    dist.all_gather_object(kinds, caught.type.__name__)
    assert sorted(kinds) == ["MatrixError", "PeerError"]


@ranks(2)
def test_updates_begin_while_other_gradients_are_to_come(rank: int, size: int) -> None:
    """The first layer's backward, the last to run, waits for an update of another layer."""
    begun, waited = Event(), []
    plugin = muon(early=True)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    for layer in model:
        fully_shard(
            layer, mesh=init_device_mesh(torch.get_default_device().type, (size,)), plugins=[plugin]
        )
    fully_shard(
        model, mesh=init_device_mesh(torch.get_default_device().type, (size,)), plugins=[plugin]
    )
    steps: Any = plugin.optimizer(model)
    update = steps._recipe.update

    def telling(*args: Any) -> torch.Tensor:
        begun.set()
        return update(*args)  # type: ignore[no-any-return]

    steps._recipe.update = telling
    model[0].register_full_backward_pre_hook(lambda *_: waited.append(begun.wait(20)))
    model(torch.randn(3, WIDTH, requires_grad=True)).square().sum().backward()
    assert waited == [True]
    steps.step()


def test_updates_that_begin_on_an_accelerator_are_ordered() -> None:
    """Launched by the backward behind what wrote their gradients, never by another thread."""
    where: list[tuple[int, str]] = []
    with recorded(1) as recorder:
        plugin = muon(early=True)
        mesh = init_device_mesh(torch.get_default_device().type, (1,))
        model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh, plugins=[plugin])
        steps: Any = plugin.optimizer(model)
        update = steps._recipe.update

        def telling(*args: Any) -> torch.Tensor:
            where.append((get_ident(), recorder.module.current))
            return update(*args)  # type: ignore[no-any-return]

        steps._recipe.update = telling
        for _ in range(3):
            model(torch.randn(3, WIDTH)).square().sum().backward()
            steps.step()
            model.zero_grad()
    assert recorder.races == []
    assert set(where) == {(get_ident(), "compute")}


@ranks(2)
def test_a_step_that_is_left_out_was_not_begun(rank: int, size: int) -> None:
    run = Run(init_device_mesh(torch.get_default_device().type, (size,)), muon(early=True))
    guard = NonFinite(run.optimizer, "skip", model=run.model)
    reference = Reference(size)
    for step in range(3):
        if step == 1:
            run.model.zero_grad()
            (loss_of(run.model, 7, rank) * math.nan).backward()
            with pytest.warns(SkippedStepWarning):
                run.optimizer.step()
        run.train(rank, 1, step)
    assert guard.skipped == 1
    run.check(reference.train(3).model)


@ranks(2)
def test_an_attempt_that_fails_takes_state_back(rank: int, size: int) -> None:
    for early in (False, True):
        run = Run(init_device_mesh(torch.get_default_device().type, (size,)), muon(early=early))
        for step in range(2):
            both = [run.optimizer, run.rest]
            with pytest.raises(AttemptError):
                step_and_fail(run, both, rank)
            with polyshard_resilience.attempt(run.model, both):
                run.train(rank, 1, step)
        run.check(Reference(size).train(2).model)


def step_and_fail(run: Run, both: list[Any], rank: int) -> None:
    with polyshard_resilience.attempt(run.model, both):
        run.train(rank, 1, 5)
        if rank == 1:
            raise ValueError("after the step")


@ranks(3)
def test_blocks_stay_in_rows(rank: int, size: int) -> None:
    """Three heads on three ranks, and two experts, which need an owner."""
    run = Run(init_device_mesh(torch.get_default_device().type, (size,)), shampoo(lr=0.05))
    sites = {m.site.name: m.site for m in run.optimizer._every()}
    rows = {name for name, site in sites.items() if not site.who}
    assert rows == {"blocks.0.query.weight", "blocks.1.query.weight"}
    assert {sites[name].first for name in rows} == {rank}
    run.train(rank, 2)
    query: Any = run.model.blocks[0].query.weight  # type: ignore[union-attr]
    assert query.grad.full_tensor().shape == query.shape, "an ordinary gradient"
    run.check(Reference(size, Shampoo, {"lr": 0.05}).train(2).model, atol=1e-5)
    before = polyshard.stats(run.model).bytes_sent
    for p in run.plugin._chosen(run.model):
        if p is not query:
            p.grad = None
    run.optimizer.step()
    assert polyshard.stats(run.model).bytes_sent == before


@ranks(2)
def test_guards_leave_steps_out_on_all_ranks(rank: int, size: int) -> None:
    run = Run(init_device_mesh(torch.get_default_device().type, (size,)), muon())
    guard = NonFinite(run.optimizer, "skip", model=run.model)
    run.train(rank, 1)
    before = [p.full_tensor() for p in run.model.parameters()]  # type: ignore[attr-defined]
    run.backward(1, rank)
    blocks: Any = run.model.blocks
    local = blocks[0].up.weight.grad.to_local()
    if local.whole.numel():
        local.whole[0, 0] = math.nan  # the owner alone sees it
    with pytest.warns(SkippedStepWarning):
        run.optimizer.step()
    assert guard.skipped == 1
    for p, value in zip(run.model.parameters(), before, strict=True):
        assert torch.equal(p.full_tensor(), value), "no step was made"  # type: ignore[attr-defined]
    run.backward(2, rank)
    run.optimizer.step()
    assert guard.skipped == 1


@ranks(2)
def test_rates_follow_schedulers(rank: int, size: int) -> None:
    run = Run(init_device_mesh(torch.get_default_device().type, (size,)), muon())
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1 / (step + 1))
    reference = Reference(size)
    theirs = torch.optim.lr_scheduler.LambdaLR(reference.optimizer, lambda step: 1 / (step + 1))
    for step in range(3):
        run.train(rank, 1, step)
        reference.train(1, step)
        schedule.step()
        theirs.step()
    run.check(reference.model)


@ranks(2)
def test_over_collectives(rank: int, size: int) -> None:
    for plugin, made_by, atol in ((muon(), torch.optim.Muon, 1e-6), (shampoo(), Shampoo, 1e-5)):
        run = Run(
            init_device_mesh(torch.get_default_device().type, (size,)), plugin, ByCollectives()
        )
        run.train(rank, 3)
        settings = {"lr": 0.02} if made_by is torch.optim.Muon else {}
        run.check(Reference(size, made_by, settings).train(3).model, atol)


@ranks(2)
def test_a_landed_gradient_refuses_what_needs_rows(rank: int, size: int) -> None:
    run = Run(init_device_mesh(torch.get_default_device().type, (size,)), muon())
    run.backward(0, rank)
    gradient: Any = run.model.blocks[0].up.weight.grad  # type: ignore[union-attr]
    with pytest.raises(UnsupportedError, match="landed whole on one rank"):
        gradient.full_tensor()
    with pytest.raises(UnsupportedError, match="landed whole on one rank"):
        gradient[0]
    doubled = gradient * 2
    assert float(doubled.norm().full_tensor()) == pytest.approx(
        2 * float(gradient.norm().full_tensor())
    )
    with pytest.raises(UnsupportedError):
        doubled.full_tensor()


def fail_an_attempt(run: Run, rank: int) -> None:
    with polyshard_resilience.attempt(run.model, [run.optimizer, run.rest]):
        loss_of(run.model, 7, rank).backward()
        raise ValueError("not this time")


@ranks(4)
def test_sums_that_wait_for_replicas_survive_an_attempt_that_failed(rank: int, size: int) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicas", "shards")
    )
    runs = [Run(mesh, muon()) for _ in range(2)]
    for run, fails in zip(runs, (False, True), strict=True):
        model: Any = run.model
        model.set_requires_all_reduce(False)
        model.set_is_last_backward(False)
        loss_of(model, 0, rank * 2).backward()
        if fails:
            with pytest.raises(AttemptError):
                fail_an_attempt(run, rank)
        model.set_requires_all_reduce(True)
        model.set_is_last_backward(True)
        loss_of(model, 0, rank * 2 + 1).backward()
        run.optimizer.step()
        run.rest.step()
    for one, other in zip(*(run.model.parameters() for run in runs), strict=True):
        assert torch.equal(one.to_local(), other.to_local())
