"""The private names behind transforms, opaque operators and hooks that are not traced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from polyshard._torch.opaque import constant_in_graphs, own_autograd, stand_ins
from polyshard._torch.private import outside_transforms, transforms_run, untraced


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")  # torch's own jvp
def test_work_outside_of_transforms() -> None:
    made: list[Tensor] = []

    def work(x: Tensor) -> Tensor:
        made.append(x + torch.ones(3))
        return x

    def function(x: Tensor) -> Tensor:
        assert transforms_run()
        outside_transforms(work)(torch.ones(3))
        work(x)
        return x * 2

    torch.func.jvp(function, (torch.ones(3),), (torch.ones(3),))
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    assert [is_wrapped(tensor) for tensor in made] == [False, True]


def test_autograd_inside_an_operator() -> None:
    x = torch.ones(3, requires_grad=True)
    with torch._C._AutoDispatchBelowAutograd():
        assert not (x * 2).requires_grad
        with own_autograd(enabled=True):
            y = (x * 2).sum()
        assert y.requires_grad
        with own_autograd(enabled=False):
            torch.autograd.backward([y], [torch.ones(())])
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_stand_ins_leave_when_the_block_ends() -> None:
    module = nn.Linear(2, 2)
    weight = module.weight
    with stand_ins(module, {"weight": torch.zeros(5, 2), "bias": torch.zeros(5)}):
        assert module(torch.ones(1, 2)).shape == (1, 5)
    assert module.weight is weight


class Doubling(nn.Module):
    """No class of torch's own: 2.15 traces the hooks of those where they are compiled alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_untraced_functions_break_no_graph_as_hooks() -> None:
    torch._dynamo.reset()
    seen = []
    module = Doubling()
    module.register_forward_pre_hook(untraced(lambda m, args: seen.append(len(args))))
    module.compile(backend="eager", fullgraph=True)
    for _ in range(2):
        module(torch.ones(1, 2))
    assert seen == [1, 1]
    assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()


def test_constants_are_found_while_tracing() -> None:
    torch._dynamo.reset()
    calls = []

    @constant_in_graphs
    def number() -> int:
        calls.append(1)
        return 3

    compiled = torch.compile(lambda x: x * number(), backend="eager", fullgraph=True)
    for _ in range(2):
        assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert calls == [1]
    torch._dynamo.reset()
