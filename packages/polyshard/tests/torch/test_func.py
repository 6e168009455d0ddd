"""``torch.func`` over sharded modules: what torch's own engine gives, before and after a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed import fsdp
from torch.func import functional_call, grad, jvp, vjp, vmap

from polyshard import fully_shard
from polyshard_testing import World, ranks

WIDTH = 8
POINT = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
DIRECTION = torch.cos(torch.arange(2.0 * WIDTH)).view(2, WIDTH)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def build(engine: Any, **kwargs: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)])
    if engine is not None:
        for block in model:
            engine(block, **kwargs)
        engine(model, **kwargs)
    return model


def loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().sum()


def derivative(function: Callable[[Tensor], Tensor], point: Tensor) -> tuple[Tensor, Tensor]:
    """A value, and how it changes with the point."""
    return cast("tuple[Tensor, Tensor]", jvp(function, (point,), (DIRECTION,)))


def gradients(model: nn.Module) -> list[Tensor]:
    found = []
    for parameter in model.parameters():
        gradient: Any = parameter.grad
        assert gradient is not None
        found.append(gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient)
        parameter.grad = None
    return found


def forward_mode(model: nn.Module) -> list[Tensor]:
    return list(derivative(model, POINT))


def forward_mode_without_grad(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        return list(derivative(model, POINT))


def backward_through_both(model: nn.Module) -> list[Tensor]:
    """The output and its derivative both send gradients to the parameters."""
    point = POINT.clone().requires_grad_()
    output, tangent = derivative(model, point)
    (output.sum() + 3 * tangent.sum()).backward()
    assert point.grad is not None
    return [output.detach(), tangent.detach(), point.grad, *gradients(model)]


def backward_through_derivative(model: nn.Module) -> list[Tensor]:
    loss, tangent = derivative(loss_of(model), POINT)
    tangent.backward()
    return [loss.detach(), tangent.detach(), *gradients(model)]


def training(model: nn.Module) -> list[Tensor]:
    found = []
    for _ in range(3):
        found += backward_through_both(model)[:2]
        model(POINT).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
    return found


def input_gradient(model: nn.Module) -> list[Tensor]:
    first = grad(loss_of(model))(POINT).detach()
    model(POINT).sum().backward()
    return [first, *gradients(model)]


def reverse_mode(model: nn.Module) -> list[Tensor]:
    output, pull = cast("tuple[Tensor, Callable[..., Any]]", vjp(model, POINT))
    return [output.detach(), pull(DIRECTION)[0].detach()]


def forward_over_reverse(model: nn.Module) -> list[Tensor]:
    return [t.detach() for t in jvp(grad(loss_of(model)), (POINT,), (DIRECTION,))]


def over_rows(model: nn.Module) -> list[Tensor]:
    output: Tensor = vmap(model)(POINT)
    return [output.detach()]


def over_unsharded_parameters(model: nn.Module) -> list[Tensor]:
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.unshard()
    held = dict(model.named_parameters())
    ones = {name: torch.ones_like(value) for name, value in held.items()}
    found = jvp(lambda p: functional_call(model, p, (POINT,)), (held,), (ones,))
    return [t.detach() for t in found]


CASES = {
    case.__name__: case
    for case in (
        forward_mode,
        forward_mode_without_grad,
        backward_through_both,
        backward_through_derivative,
        training,
        input_gradient,
        reverse_mode,
        forward_over_reverse,
        over_rows,
        over_unsharded_parameters,
    )
}


def as_torch_does(rank: int, size: int, case: str, ran: bool, kwargs: dict[str, Any]) -> None:
    found = []
    for engine in (None, fsdp.fully_shard, fully_shard):
        model = build(engine, **kwargs)
        if ran:
            model(POINT).sum().backward()
            model.zero_grad()
        found.append(CASES[case](model))
    one_process, torchs, ours = found
    for a, b, c in zip(one_process, torchs, ours, strict=True):
        assert torch.equal(b, c)
        torch.testing.assert_close(c, a)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kwargs", [{}, {"reshard_after_forward": False}], ids=["frees", "keeps"])
@pytest.mark.parametrize("ran", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("case", list(CASES))
def test_as_torch_does(world2: World, case: str, ran: bool, kwargs: dict[str, Any]) -> None:
    world2.run(as_torch_does, case, ran, kwargs)


@ranks(2)
def test_dual_numbers(rank: int, size: int) -> None:
    """Forward mode without ``torch.func``, where torch's own engine raises."""
    found = []
    for engine in (None, fully_shard):
        model, point = build(engine), POINT.clone().requires_grad_()
        with forward_ad.dual_level():
            output, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(point, DIRECTION)))
            assert tangent is not None
            (output.sum() + 3 * tangent.sum()).backward()
        assert point.grad is not None
        found.append([output.detach(), tangent.detach(), point.grad, *gradients(model)])
    torch.testing.assert_close(found[1], found[0])


@ranks(2)
def test_differentiated_again(rank: int, size: int) -> None:
    """Gradients of gradients reach freed parameters, under both engines: an error, never zeros."""
    for engine in (fsdp.fully_shard, fully_shard):
        model = build(engine)
        penalty = grad(loss_of(model))(POINT).square().sum()
        with pytest.raises(RuntimeError):
            penalty.backward()
