"""Steps with gradients that are not finite: stopped or left out, alike on all ranks."""

from __future__ import annotations

import copy
import gc
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import StepLR
from toy_meshes import on_several_meshes
from toy_models import build, full, loss_of, shard, tokens_for

from polyshard import fully_shard
from polyshard.errors import NonFiniteError, SettingError, UnsupportedError
from polyshard_resilience import NonFinite
from polyshard_resilience.errors import SkippedStepWarning
from polyshard_testing import ranks

SMALL = {"width": 24, "hidden": 30, "layers": 2}
MESHES = {"fsdp": (4,), "hsdp": (2, 2), "replicas": (4, 1)}
BAD = 2


def local_gradient(parameter: Any) -> Tensor:
    gradient = parameter.grad
    found: Tensor = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return found


def sharded(shape: tuple[int, ...]) -> Any:
    mesh = init_device_mesh(
        torch.get_default_device().type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
    )
    return shard(build(**SMALL), fully_shard, mesh=mesh)


# --- in one process -------------------------------------------------------------------------------

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adafactor": torch.optim.Adafactor,
    "rprop": torch.optim.Rprop,
}


def trained(make: Make, guarded: bool, scheduler_first: bool) -> list[Any]:
    """Six steps, one of them on bad data: with a scaler, which is torch's way, or the guard."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    optimizer = make(list(model.parameters()))
    scaler = torch.amp.GradScaler(
        torch.get_default_device().type, init_scale=1.0, enabled=not guarded
    )
    schedulers = [StepLR(optimizer, 2)] if scheduler_first else []
    if guarded:
        NonFinite(optimizer, "skip")
    schedulers = schedulers or [StepLR(optimizer, 2)]
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    gradients = []
    for step in range(6):
        x = torch.randn(4, 3) * (math.inf if step == BAD else 1)
        scaler.scale(model(x).square().sum()).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SkippedStepWarning)
            scaler.step(optimizer)
        scaler.update()
        gradients.append([p.grad for p in model.parameters()])
        optimizer.zero_grad()
        schedulers[0].step()
    values = [*model.parameters(), *(s for v in optimizer.state.values() for s in v.values())]
    rates = [group["lr"] for group in optimizer.param_groups]
    bad = [None if g is None else g.isfinite().tolist() for g in gradients[BAD]]
    return [[v.detach() if isinstance(v, Tensor) else v for v in values], rates, len(calls), bad]


@pytest.mark.parametrize("scheduler_first", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_left_out_is_one_a_scaler_skips(name: str, scheduler_first: bool) -> None:
    values, *ours = trained(OPTIMIZERS[name], True, scheduler_first)
    expected, *theirs = trained(OPTIMIZERS[name], False, scheduler_first)
    assert ours == theirs
    for a, b in zip(values, expected, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def pair(action: Any = "stop", **kwargs: Any) -> tuple[nn.Parameter, Any, NonFinite]:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    return weight, optimizer, NonFinite(optimizer, action, **kwargs)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_kind_of_value_in_every_dtype_is_found(bad: float, dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(9, dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    NonFinite(optimizer)
    for place in range(9):
        gradient = torch.zeros(9, dtype=dtype)
        gradient[place] = bad
        weight.grad = gradient
        with pytest.raises(NonFiniteError, match=r"parameter 0 of group 0' \(1 of 9 elements"):
            optimizer.step()
    gradient[:2] = torch.tensor([math.inf, -math.inf])
    with pytest.raises(NonFiniteError):
        optimizer.step()
    assert torch.equal(weight, torch.ones(9, dtype=dtype))


def test_large_gradients_are_no_infinities() -> None:
    """Their sum is, in their own dtype."""
    for dtype in (torch.float16, torch.float32):
        weight = nn.Parameter(torch.zeros(8, dtype=dtype))
        optimizer = torch.optim.SGD([weight], lr=2.0**-10)
        NonFinite(optimizer)
        weight.grad = torch.full((8,), torch.finfo(dtype).max, dtype=dtype)
        optimizer.step()
        assert weight.ne(0).all()


def test_it_gives_up_after_so_many_in_a_row() -> None:
    weight, optimizer, guard = pair("skip", give_up_after=3)

    def step(value: float) -> None:
        weight.grad = torch.full((4,), value)
        optimizer.step()

    for _ in range(2):
        for count in (1, 2):
            with pytest.warns(SkippedStepWarning, match="The step was left out"):
                step(math.nan)
            assert guard.in_a_row == count
        step(0.0)
        assert guard.in_a_row == 0
    assert guard.skipped == 4
    again = pair("skip", give_up_after=3)[2]
    again.load_state_dict(guard.state_dict())
    assert (again.skipped, again.in_a_row) == (4, 0)
    for _ in range(2):
        with pytest.warns(SkippedStepWarning):
            step(math.nan)
    with pytest.raises(NonFiniteError, match="2 steps before this one were left out"):
        step(math.nan)
    guard.remove()
    step(math.nan)
    assert weight.isnan().all()


def test_closures_are_looked_at_after_they_ran() -> None:
    weight, optimizer, _ = pair("skip")
    values = iter([math.nan, 1.0])

    def closure() -> float:
        optimizer.zero_grad()
        weight.grad = torch.full((4,), next(values))
        return 7.0

    with pytest.warns(SkippedStepWarning):
        assert optimizer.step(closure) == 7.0
    assert torch.equal(weight, torch.ones(4))
    assert optimizer.step(closure=closure) == 7.0
    assert torch.equal(weight, torch.full((4,), 0.5))


def test_a_closure_that_fails_half_way_stops() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.LBFGS([weight], max_iter=5)
    NonFinite(optimizer, "skip")
    values = iter([1.0, math.nan])

    def closure() -> Tensor:
        weight.grad = torch.full((4,), next(values))
        return weight.sum()

    with pytest.raises(NonFiniteError, match="in the middle of a step"):
        optimizer.step(closure)


def test_optimizers_are_freed_copied_and_saved_as_before() -> None:
    weight, optimizer, guard = pair()
    twin = copy.deepcopy(optimizer)
    twin.param_groups[0]["params"][0].grad = torch.full((4,), math.nan)
    twin.step()  # a copy is not guarded, and does not step the original
    assert torch.equal(weight, torch.ones(4))
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None, "the guard keeps it alive"
    finally:
        gc.enable()
    with pytest.raises(SettingError, match="is gone"):
        guard.clip_grad_norm_(1.0)


def test_bad_settings() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with pytest.raises(SettingError, match="takes 'stop' or 'skip'"):
        NonFinite(optimizer, "halt")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="it is at least 1"):
        NonFinite(optimizer, "skip", give_up_after=0)
    with pytest.raises(SettingError, match=r"takes a torch\.optim\.Optimizer"):
        NonFinite(weight)  # type: ignore[arg-type]
    optimizer.steps_in_backward = True  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match="steps in backward"):
        NonFinite(optimizer)


def test_names_are_those_the_optimizer_was_given() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    NonFinite(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert model.bias.grad is not None
    model.bias.grad[1] = math.nan
    with pytest.raises(NonFiniteError, match=r"'bias' \(1 of 2 elements on rank 0\)"):
        optimizer.step()


# --- on ranks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", MESHES.values(), ids=list(MESHES))
@pytest.mark.parametrize("odd", [0, 3])
@ranks(4)
def test_one_rank_stops_all(rank: int, size: int, odd: int, shape: tuple[int, ...]) -> None:
    """One element on one rank: every rank raises the same, naming parameter and rank."""
    model = sharded(shape)
    model.blocks[0].norm.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    NonFinite(optimizer, model=model)
    loss_of(model, tokens_for(0, rank)).backward()
    if rank == odd:
        local_gradient(model.blocks[1].up.weight).view(-1)[3] = math.inf
    before = [full(p.detach()).clone() for p in model.parameters()]
    with pytest.raises(NonFiniteError) as caught:
        optimizer.step()
    said: list[Any] = [None] * size
    dist.all_gather_object(said, str(caught.value))
    assert len(set(said)) == 1
    rows = [len(chunk) for chunk in torch.arange(30).chunk(shape[-1])][odd % shape[-1]]
    assert f"'blocks.1.up.weight' (1 of {24 * rows} elements on rank {odd})" in said[0]
    assert not optimizer.state
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(full(parameter.detach()), value)


@pytest.mark.parametrize("shape", MESHES.values(), ids=list(MESHES))
@ranks(4)
def test_a_step_left_out_on_all_ranks_changes_nothing(
    rank: int, size: int, shape: tuple[int, ...]
) -> None:
    """Bitwise the training that never saw the bad batch."""
    models = [sharded(shape), sharded(shape)]
    guarded, plain = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models)
    guard = NonFinite(guarded, "skip", model=models[0])
    for step in range(4):
        loss_of(models[0], tokens_for(step, rank)).backward()
        if step == BAD:
            if rank == size - 1:
                local_gradient(models[0].head.weight)[0] = math.nan
            with pytest.warns(SkippedStepWarning, match=r"'head.weight' .* on rank 3\)"):
                guarded.step()
        else:
            guarded.step()
            loss_of(models[1], tokens_for(step, rank)).backward()
            plain.step()
            plain.zero_grad()
        guarded.zero_grad()
    assert (guard.skipped, guard.in_a_row) == (1, 0)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local())
        ours, theirs = guarded.state[a], plain.state[b]
        assert all(torch.equal(full(ours[k]), full(theirs[k])) for k in theirs)


@ranks(4)
def test_parameters_of_several_meshes_share_a_verdict(rank: int, size: int) -> None:
    """Uneven and empty shards, a mesh of its own, a replicated and a plain parameter."""
    module = on_several_meshes()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=False)
    NonFinite(optimizer, model=module)
    for name in ("short", "wide", "expert", "whole", "plain"):
        for odd in range(size):
            for parameter in module.parameters():
                parameter.grad = torch.zeros_like(parameter)
            local = local_gradient(getattr(module, name))
            holds = torch.tensor(bool(local.numel()) and rank == odd)
            if holds:
                local.view(-1)[-1] = math.nan
            dist.all_reduce(holds, dist.ReduceOp.MAX)
            if holds:
                with pytest.raises(NonFiniteError, match=rf"'{name}' .*on rank {odd}\)"):
                    optimizer.step()
            else:
                optimizer.step()


@ranks(2)
def test_clipping_and_the_guard_look_once(rank: int, size: int) -> None:
    model, twin = sharded((2,)), sharded((2,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NonFinite(optimizer, model=model)
    for each in (model, twin):
        loss_of(each, tokens_for(0, rank)).backward()
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    sent = []
    all_reduce = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        sent.append(1)
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counted
    try:
        norm = guard.clip_grad_norm_(0.5)
        assert len(sent) == 1
        optimizer.step()
        assert len(sent) == 1  # the norm has told that all is well
        optimizer.step()
        assert len(sent) == 2  # but for one step only
    finally:
        dist.all_reduce = all_reduce
    torch.testing.assert_close(norm, full(expected))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(local_gradient(a), local_gradient(b))


def left_out(optimizer: Any, backward: Callable[[], None], guard: NonFinite) -> None:
    optimizer.zero_grad()
    backward()


def zeroed_in_place(optimizer: Any, backward: Callable[[], None], guard: NonFinite) -> None:
    optimizer.zero_grad(set_to_none=False)
    backward()


def another_backward(optimizer: Any, backward: Callable[[], None], guard: NonFinite) -> None:
    backward()


def scaled(optimizer: Any, backward: Callable[[], None], guard: NonFinite) -> None:
    """A ``GradScaler`` steps, and the loop continues with gradients that it zeroes in place."""
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    zeroed_in_place(optimizer, backward, guard)


def another_norm(optimizer: Any, backward: Callable[[], None], guard: NonFinite) -> None:
    left_out(optimizer, backward, guard)
    guard.clip_grad_norm_(1.0)


STALE = [left_out, zeroed_in_place, another_backward, scaled, another_norm]


@pytest.mark.parametrize("between", STALE, ids=lambda between: between.__name__)
@ranks(2)
def test_a_norm_speaks_for_its_own_gradients_only(rank: int, size: int, between: Any) -> None:
    """What happens between clipping and the step makes other gradients of them."""
    model: Any = fully_shard(nn.Linear(6, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    guard = NonFinite(optimizer, "skip", model=model)

    def backward(scale: float = math.nan) -> None:
        (model(torch.ones(2, 6)).sum() * scale).backward()

    backward(1.0)
    assert guard.clip_grad_norm_(1.0).isfinite()
    between(optimizer, backward, guard)
    before = [p.to_local().clone() for p in model.parameters()]
    with pytest.warns(SkippedStepWarning, match="'weight'"):
        optimizer.step()
    assert guard.skipped == 1
    for parameter, expected in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.to_local(), expected)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@ranks(2)
def test_clipping_leaves_bad_gradients_to_be_named(rank: int, size: int, norm_type: float) -> None:
    """Scaled by a norm that is not a number, every gradient would look guilty."""
    model = sharded((2,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NonFinite(optimizer, model=model)
    loss_of(model, tokens_for(0, rank)).backward()
    if rank:
        local_gradient(model.blocks[0].down.weight).view(-1)[5] = math.nan
    guard.clip_grad_norm_(1.0, norm_type)
    with pytest.raises(NonFiniteError) as caught:
        optimizer.step()
    assert "'blocks.0.down.weight' (1 of 360 elements on rank 1)." in str(caught.value)
    assert local_gradient(model.head.weight).isfinite().all()


@pytest.mark.parametrize("fused", [True, False])
@ranks(2)
def test_a_scaler_is_left_alone(rank: int, size: int, fused: bool) -> None:
    """Scales and weights are those without the guard; it finds nothing and counts nothing."""
    found = []
    for guarded in (True, False):
        torch.manual_seed(0)
        model: Any = fully_shard(nn.Linear(6, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        guard = NonFinite(optimizer, "skip") if guarded else None
        scaler = torch.amp.GradScaler(
            torch.get_default_device().type, init_scale=2.0**10, growth_interval=2
        )
        scales = []
        for step in range(5):
            x = torch.full((2, 6), 0.1 * (rank + 1) + step)
            if step == BAD and rank == size - 1:
                x[0, 0] = math.inf
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        assert guard is None or guard.skipped == 0
        found.append((scales, model.weight.to_local().detach().clone()))
    assert found[0][0] == found[1][0]
    assert found[0][0][BAD] < found[0][0][BAD - 1]
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][1].isfinite().all()


@ranks(2)
def test_torchs_own_engine_is_guarded_as_well(rank: int, size: int) -> None:
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    model = shard(build(**SMALL), torch_fully_shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    NonFinite(optimizer, model=model)
    loss_of(model, tokens_for(0, rank)).backward()
    optimizer.step()
    if rank:
        local_gradient(model.embedding.weight)[0] = math.nan
    with pytest.raises(NonFiniteError, match=r"'embedding.weight' \(24 of"):
        optimizer.step()
