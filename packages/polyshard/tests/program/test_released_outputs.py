"""Tensor classes that need what arrived no longer once they were given it (torch 2.15's method)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from toy_models import full
from toy_tensors import Coded, OldForm

from polyshard import fully_shard
from polyshard.errors import ModuleError
from polyshard_testing import raises_in_step, ranks

RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


class Releasing(Coded):
    """Decodes what arrived into memory of its own."""

    given: tuple[Tensor, ...] = ()

    def fsdp_post_all_gather(self, outputs: tuple[Tensor, ...], *rest: Any, **named: Any) -> Any:
        Releasing.given = outputs
        return super().fsdp_post_all_gather(outputs, *rest, **named)

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


class Unsure(Coded):
    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> Any:
        return "perhaps"


class Half(torch.Tensor):
    """Has the new method and nothing that it could be for."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


def model_of(kind: Any) -> Any:
    torch.manual_seed(0)
    linears = [nn.Linear(8, 8, bias=False) for _ in range(2)]
    for linear in linears:
        linear.weight = nn.Parameter(kind(linear.weight.detach().clone()))
    return nn.Sequential(*linears)


def held_bytes(rank: int, function: Any, kind: Any) -> Iterator[tuple[int, Tensor]]:
    """Memory of what arrived last, after each forward, with the weights it trained to."""
    model = function(model_of(kind))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(3):
        out = model(torch.full((2, 8), rank + step + 1.0))
        yield sum(t.untyped_storage().nbytes() for t in Releasing.given), full(out.detach())
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@ranks(2)
def test_what_arrived_is_freed_at_once(rank: int, size: int) -> None:
    ours = list(held_bytes(rank, fully_shard, Releasing))
    assert [held for held, _ in ours] == [0, 0, 0]
    plain = list(held_bytes(rank, fully_shard, Coded))
    for (_, found), (_, expected) in zip(ours, plain, strict=True):
        assert torch.equal(found, expected)
    if hasattr(torch_fsdp.FSDPModule, "finalize_backward"):
        theirs = list(held_bytes(rank, torch_fsdp.fully_shard, Releasing))
        for (held, found), (theirs_held, expected) in zip(ours, theirs, strict=True):
            assert held == theirs_held
            assert torch.equal(found, expected)


@ranks(2)
def test_classes_that_say_nothing_keep_it(rank: int, size: int) -> None:
    """What they compute with may be what arrived."""
    model = fully_shard(model_of(OldForm), reshard_after_forward=False)
    model(torch.ones(1, 8)).sum().backward()
    model(torch.ones(1, 8)).sum().backward()


@ranks(2)
def test_answers_that_are_none(rank: int, size: int) -> None:
    model = fully_shard(model_of(Unsure))
    with raises_in_step(ModuleError, rf"'0\.weight': Unsure\.{RELEASE} returned 'perhaps'"):
        model(torch.ones(1, 8))
    half = nn.Linear(8, 8, bias=False)
    half.weight = nn.Parameter(torch.randn(8, 8).as_subclass(Half))
    with pytest.raises(ModuleError, match="lacks fsdp_pre_all_gather"):
        fully_shard(half)
