"""A dtype of compute for each parameter: ``MixedPrecisionPolicy(param_dtype_override_fn=...)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from toy_models import assert_same_parameters, build, loss_of, shard, tokens_for, train
from toy_refusals import refused

from polyshard import MixedPrecisionPolicy, describe, fully_shard
from polyshard.errors import PlanMismatchError, SettingError
from polyshard_testing import World, ranks

BF16 = torch.bfloat16
Override = Callable[[nn.Parameter], Any]
TORCH_HAS_IT = "param_dtype_override_fn" in {f.name for f in fields(MixedPrecisionPolicy)}


@dataclass(frozen=True)
class WithOverride(MixedPrecisionPolicy):
    """What replaces the keyword on a torch that lacks it."""

    param_dtype_override_fn: Override | None = None


def policy(override: Override, **kwargs: Any) -> MixedPrecisionPolicy:
    made: Any = MixedPrecisionPolicy if TORCH_HAS_IT else WithOverride
    return made(param_dtype=BF16, param_dtype_override_fn=override, **kwargs)  # type: ignore[no-any-return]


def norms_in_full(parameter: nn.Parameter) -> torch.dtype | None:
    return torch.float32 if parameter.dim() == 1 else None


class Seen(nn.Module):
    """Computes in the dtype of each parameter, and notes them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.ones(5))
        self.count = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {name: p.dtype for name, p in self.named_parameters()} | {"x": x.dtype}
        out: Tensor = (x @ self.linear.weight.t()).float() * self.scale.float()
        return out + self.linear.bias.float()


@ranks(2)
def test_each_parameter_computes_in_its_own_dtype(rank: int, size: int) -> None:
    asked: list[torch.Size] = []

    def override(parameter: nn.Parameter) -> torch.dtype | None:
        asked.append(parameter.shape)
        return norms_in_full(parameter) if parameter.is_floating_point() else None

    model: Any = fully_shard(Seen(), mp_policy=policy(override))
    assert len(asked) == 4, "once for each parameter"
    model(torch.ones(2, 6)).sum().backward()
    assert len(asked) == 4
    assert model.seen == {
        "linear.weight": BF16,
        "linear.bias": torch.float32,
        "scale": torch.float32,
        "count": torch.int64,
        "x": BF16,
    }
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.dtype == torch.float32, name
    dtypes = sorted(str(g.dtypes).rsplit(" / ", 1)[0] for g in describe(model).groups)
    assert dtypes == ["float32 / bfloat16", "float32 / float32", "int64 / int64"]


@pytest.mark.skipif(not TORCH_HAS_IT, reason="MixedPrecisionPolicy got the keyword in torch 2.15")
@pytest.mark.parametrize("reduce", [None, torch.float32, BF16], ids=str)
@ranks(2)
def test_training_is_torchs(rank: int, size: int, reduce: torch.dtype | None) -> None:
    def override(parameter: nn.Parameter) -> torch.dtype | None:
        return torch.float32 if parameter.shape[0] == 101 else None

    runs = []
    for function in (torch_fsdp.fully_shard, fully_shard):
        model: Any = build()
        model.head.register_forward_pre_hook(lambda m, args: tuple(a.float() for a in args))
        shard(model, function, mp_policy=policy(override, reduce_dtype=reduce))
        runs.append((model, train(model, [tokens_for(s, rank) for s in range(3)])))
    (theirs, expected), (ours, found) = runs
    assert found.losses == expected.losses
    assert_same_parameters(ours, theirs, exact=True)


@ranks(2)
def test_a_unit_of_which_all_is_overridden_is_one_without(rank: int, size: int) -> None:
    """Bitwise, on every torch: inputs alone are cast."""
    runs = []
    for given in (policy(lambda p: p.dtype, cast_forward_inputs=False), MixedPrecisionPolicy()):
        model = shard(build(width=24, hidden=30, layers=1), fully_shard, mp_policy=given)
        runs.append((model, [loss_of(model, tokens_for(0, rank)).detach()]))
    assert runs[0][1] == runs[1][1]


@ranks(2)
def test_other_answers_are_refused(rank: int, size: int) -> None:
    def call(answer: object) -> None:
        fully_shard(nn.Linear(4, 4), mp_policy=policy(lambda p: answer))

    refused(SettingError, r"returned torch.float64 for 'weight'", call, torch.float64)
    refused(SettingError, r"returned 'float32' for 'weight'", call, "float32")
    with pytest.raises(ValueError, match="param_dtype"):  # what torch raises
        call(torch.float64)


def rank_dependent(rank: int, size: int) -> None:
    def override(parameter: nn.Parameter) -> torch.dtype | None:
        return parameter.dtype if rank == 0 and parameter.shape == (7, 6) else None

    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 7))
    fully_shard(model, mp_policy=policy(override))
    with pytest.raises(PlanMismatchError, match=r"1\.weight"):
        model(torch.ones(1, 6))


def test_answers_that_differ_between_ranks() -> None:
    """Torch says that it may hang; here every rank is told which parameter it is."""
    world = World(2)
    try:
        world.run(rank_dependent)
    finally:
        world.close()
