"""Parameters of every odd kind, against one process that trains the same model."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from toy_collectives import ByCollectives
from toy_comms import RotatedReduce
from toy_models import full

from polyshard import MixedPrecisionPolicy, describe, fully_shard
from polyshard.engine.root import unit_of
from polyshard.errors import IneffectiveSettingWarning
from polyshard_testing import World, ranks

STEPS = 3


class Odd(nn.Module):
    """Uneven, short, scalar, zero-size, frozen, shared and strided parameters in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.short = nn.Parameter(torch.randn(1, 6))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 6))
        self.frozen = nn.Parameter(torch.randn(5, 6), requires_grad=False)
        self.strided = nn.Parameter(torch.randn(6, 9).t())
        self.project = nn.Linear(6, 7, bias=False)
        self.project.weight = self.table.weight

    def forward(self, index: Tensor) -> Tensor:
        x = self.table(index) * self.scale + self.short + self.nothing.sum()
        x = x + F.linear(x, self.frozen).sum(-1, keepdim=True)
        x = x + F.linear(x, self.strided).mean(-1, keepdim=True)
        out: Tensor = self.project(x)
        return out


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 7, (5,), generator=generator)


def make_odd() -> Odd:
    torch.manual_seed(3)
    return Odd()


def train_both(
    ours: nn.Module,
    reference: nn.Module,
    rank: int,
    size: int,
    optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    optimizers = [
        optimizer([p for p in m.parameters() if p.requires_grad]) for m in (ours, reference)
    ]
    for step in range(STEPS):
        F.cross_entropy(ours(batch(step, rank)), batch(step, rank)).backward()
        for r in range(size):
            loss = F.cross_entropy(reference(batch(step, r)), batch(step, r)) / size
            loss.backward()
        ours_norm, norm = (nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (ours, reference))
        torch.testing.assert_close(full(ours_norm), norm, rtol=1e-5, atol=1e-6)
        for each in optimizers:
            each.step()
            each.zero_grad()
    for (name, a), b in zip(ours.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(a.detach()), b.detach(), rtol=1e-4, atol=1e-5, msg=name)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, foreach=True)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


def odd_parameters(rank: int, size: int, optimizer: str) -> None:
    ours, reference = make_odd(), make_odd()
    names = [n for n, _ in ours.named_parameters()]
    fully_shard(ours)
    assert [n for n, _ in ours.named_parameters()] == names
    assert ours.table.weight is ours.project.weight
    placements = {n: p.placements for n, p in ours.named_parameters() if isinstance(p, DTensor)}
    assert placements["scale"] == (Replicate(),)
    assert placements["short"] == (Shard(0),)
    for parameter in ours.parameters():
        assert isinstance(parameter, DTensor)
    train_both(ours, reference, rank, size, OPTIMIZERS[optimizer])
    assert ours.table.weight is ours.project.weight
    assert ours.frozen.grad is None
    scalar: Any = ours.scale
    scale = scalar.detach().to_local()
    everyone = [torch.empty_like(scale) for _ in range(size)]
    torch.distributed.all_gather(everyone, scale)
    assert all(torch.equal(other, scale) for other in everyone)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_odd_parameters_on_three_ranks(world3: World, optimizer: str) -> None:
    world3.run(odd_parameters, optimizer)


def test_odd_parameters_on_one_and_four_ranks(world1: World, world4: World) -> None:
    world1.run(odd_parameters, "sgd")
    world4.run(odd_parameters, "adamw")


@pytest.mark.parametrize("how", ["collectives", "custom"])
@ranks(4)
def test_scalars_have_the_same_sums(rank: int, size: int, how: str) -> None:
    """Though a reduce-scatter may add each rank's chunk in another order."""
    model: Any = make_odd()
    fully_shard(model, plugins=[ByCollectives()] if how == "collectives" else [])
    if how == "custom":
        model.set_custom_reduce_scatter(RotatedReduce())
    for step in range(STEPS):
        F.cross_entropy(model(batch(step, rank)), batch(step, rank)).backward()
        gradient: Any = model.scale.grad
        own = gradient.to_local()
        everyone = [torch.empty_like(own) for _ in range(size)]
        torch.distributed.all_gather(everyone, own)
        assert all(torch.equal(other, own) for other in everyone)


@ranks(3)
def test_padding_does_not_matter(rank: int, size: int) -> None:
    """What padding holds never reaches a result."""
    ours, reference = make_odd(), make_odd()
    fully_shard(ours)
    unit = unit_of(ours)
    assert unit is not None
    for group in unit.groups:
        held = torch.zeros_like(group.shards.buffer, dtype=torch.bool)
        for placed in group.shards.layout.parameters:
            held[placed.shard_offset :][: placed.local_numel(rank)] = True
        group.shards.buffer[~held] = float("nan")
    train_both(ours, reference, rank, size, sgd)


@ranks(2, 3)
def test_any_dim_may_be_sharded(rank: int, size: int) -> None:
    """Shard(1), even and not, and a negative dim; small and large."""
    torch.manual_seed(5)
    reference = nn.Sequential(nn.Linear(8, 250), nn.Tanh(), nn.Linear(250, 7))
    torch.manual_seed(5)
    ours = nn.Sequential(nn.Linear(8, 250), nn.Tanh(), nn.Linear(250, 7))
    fully_shard(ours, shard_placement_fn=lambda p: Shard(-1) if p.ndim == 2 else None)
    assert ours[2].weight.placements == (Shard(1),)  # type: ignore[union-attr]
    optimizers = [sgd(m.parameters()) for m in (ours, reference)]
    for step in range(STEPS):
        inputs = [
            torch.randn(4, 8, generator=torch.Generator().manual_seed(step * 9 + r))
            for r in range(size)
        ]
        ours(inputs[rank]).square().mean().backward()
        for x in inputs:
            (reference(x).square().mean() / size).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    for a, b in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(a.detach()), b.detach(), rtol=1e-4, atol=1e-5)


@ranks(2)
def test_a_dim_for_a_scalar_is_not_dropped_in_silence(rank: int, size: int) -> None:
    module: Any = nn.Module()
    module.scale = nn.Parameter(torch.tensor(2.0))
    with pytest.warns(IneffectiveSettingWarning, match="for 'scale', which has no effect"):
        fully_shard(module, shard_placement_fn=lambda p: Shard(0))
    assert module.scale.placements == (Replicate(),)


@ranks(2)
def test_mixed_dtypes_make_groups(rank: int, size: int) -> None:
    module: Any = nn.Module()
    module.a = nn.Parameter(torch.ones(6, 4))
    module.b = nn.Parameter(torch.ones(6, 4, dtype=torch.bfloat16))
    module.c = nn.Parameter(torch.arange(6), requires_grad=False)
    module.forward = lambda x: (x * module.a + module.b.float()).sum() + module.c.sum()
    module.a.note = "kept"
    notice = r"param_dtype=torch\.bfloat16 has no effect on torch\.int64 parameters"
    with pytest.warns(IneffectiveSettingWarning, match=notice):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    (line,) = re.findall(rf"{notice}.*", str(describe(module)))
    assert line.endswith("[(root)#2]")
    assert module.a.note == "kept"
    unit = unit_of(module)
    assert unit is not None
    assert [g.shards.dtype for g in unit.groups] == [torch.float32, torch.bfloat16, torch.int64]
    module(torch.full((6, 4), float(rank + 1))).backward()
    assert module.a.grad.dtype == torch.float32
    assert module.b.grad.dtype == torch.bfloat16
    mean = sum(range(1, size + 1)) / size
    assert torch.equal(full(module.a.grad), torch.full((6, 4), mean))
    assert torch.equal(full(module.b.grad), torch.ones(6, 4, dtype=torch.bfloat16))


class Branches(nn.Module):
    """Two layers, either of which may stay unused."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.b = nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor, use_b: bool) -> Tensor:
        out: Tensor = self.a(x)
        return self.b(out) if use_b else out


@ranks(2)
def test_unused_parameters(rank: int, size: int) -> None:
    model: Any = fully_shard(Branches())
    model(torch.ones(1, 3), False).sum().backward()
    assert [p.grad is None for p in model.parameters()] == [False, True]
    model.set_reduce_scatter_unused_params(True)
    model.zero_grad()
    model(torch.ones(1, 3), rank == 0).sum().backward()  # other ranks do not use b
    assert model.b.weight.grad is not None
    torch.manual_seed(0)
    twin: Any = Branches()
    twin(torch.ones(1, 3), True).sum().backward()
    torch.testing.assert_close(full(model.b.weight.grad), twin.b.weight.grad / size)


@ranks(2)
def test_freezing_between_steps(rank: int, size: int) -> None:
    model = fully_shard(Branches())
    x = torch.ones(1, 3)
    for trainable in (True, False, True):
        model.a.weight.requires_grad_(trainable)
        with torch.no_grad():
            model(x, True)
        model(x, True).sum().backward()
        assert (model.a.weight.grad is not None) is trainable
        assert model.b.weight.grad is not None
        model.zero_grad()


@ranks(2)
def test_ignored_parameters_are_left_alone(rank: int, size: int) -> None:
    model = Branches()
    kept: Any = model.b.weight
    fully_shard(model, ignored_params={kept})
    assert model.b.weight is kept
    model(torch.full((1, 3), float(rank + 1)), True).sum().backward()
    assert not isinstance(kept.grad, DTensor)
    assert isinstance(model.a.weight.grad, DTensor)


class Scaled(nn.Parameter):
    """With a scale beside the values, as quantized weights of other libraries have one."""

    scale: Tensor | None = None


class ScaledLinear(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.weight: Any = kind(torch.ones(3, 3), requires_grad=False)
        self.weight.scale = torch.tensor(0.5)
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        scale = getattr(self.weight, "scale", None)
        weight = self.weight if scale is None else self.weight * scale
        return nn.functional.linear(x, weight, self.bias)


@pytest.mark.parametrize("kind", [nn.Parameter, Scaled])
@ranks(2)
def test_what_a_parameter_keeps_beside_its_values(
    rank: int, size: int, kind: type[nn.Parameter]
) -> None:
    model: Any = fully_shard(ScaledLinear(kind))
    assert model.weight.scale == 0.5
    for _ in range(2):
        assert torch.equal(model(torch.ones(1, 3)), torch.full((1, 3), 1.5))


@ranks(2)
def test_recurrent_modules(rank: int, size: int) -> None:
    """An LSTM keeps its own list of weights and watches attributes."""
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(nn.LSTM(5, 7, batch_first=True))
    ours, reference = models
    fully_shard(ours)
    inputs = [torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    ours(inputs[rank])[0].sum().backward()
    for x in inputs:
        (reference(x)[0].sum() / size).backward()
    for a, b in zip(ours.parameters(), reference.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(full(a.grad), b.grad)


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.0, 8.0])
@ranks(2)
def test_gradient_divide_factor(rank: int, size: int, factor: float) -> None:
    model = fully_shard(nn.Linear(4, 4, bias=False))
    model.set_gradient_divide_factor(factor)  # type: ignore[operator]
    model(torch.full((1, 4), float(rank + 1))).sum().backward()
    total = sum(range(1, size + 1))
    assert model.weight.grad is not None
    assert torch.equal(full(model.weight.grad), torch.full((4, 4), total) / factor)


@ranks(2)
def test_accumulation_keeps_low_bits(rank: int, size: int) -> None:
    """256 + 1 does not fit bf16; accumulation in the reduce dtype keeps it."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(Branches(), mp_policy=policy)
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    model(torch.full((1, 3), 256.0), False).sum().backward()
    model.set_requires_gradient_sync(True)  # type: ignore[operator]
    # b is used for the first time on the last micro-batch: its gradient is fresh, a's is not.
    model(torch.ones(1, 3), True).sum().backward()
    assert model.b.weight.grad is not None
    gradient = full(model.a.weight.grad)  # type: ignore[arg-type]
    torch.manual_seed(0)
    twin = Branches()
    first = torch.full((3, 3), 256.0)
    second = twin.b.weight.to(torch.bfloat16).sum(0)[:, None].expand(3, 3).float()
    torch.testing.assert_close(
        gradient, first + second.to(torch.bfloat16).float(), rtol=0, atol=0.02
    )
    assert not torch.equal(gradient, gradient.to(torch.bfloat16).float())


@ranks(2)
def test_optimizer_in_backward(rank: int, size: int) -> None:
    model = fully_shard(Branches())
    calls: list[str] = []

    def hook(name: str) -> Callable[[Tensor], None]:
        def run(parameter: Tensor) -> None:
            assert isinstance(parameter.grad, DTensor)
            calls.append(name)
            with torch.no_grad():
                parameter.sub_(parameter.grad)
            parameter.grad = None

        return run

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(hook(name))
    for _ in range(2):
        model(torch.ones(1, 3), True).sum().backward()
    assert sorted(calls) == sorted(2 * ["a.weight", "b.weight"])
