"""Mixed precision: casts of inputs and outputs, policies per unit, scaled fp16, gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from toy_models import assert_same_parameters, build, full, loss_of, shard, tokens_for, train

from polyshard import MixedPrecisionPolicy, describe, fully_shard
from polyshard_testing import ranks

BF16 = torch.bfloat16
POLICIES = {
    "reduce in fp32": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
    "reduce by default": MixedPrecisionPolicy(param_dtype=BF16),
    "reduce in bf16 only": MixedPrecisionPolicy(reduce_dtype=BF16),
    "inputs as they are": MixedPrecisionPolicy(reduce_dtype=BF16, cast_forward_inputs=False),
    "fp16": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", list(POLICIES))
@ranks(2)
def test_policies_give_what_fsdp2_gives(rank: int, size: int, name: str) -> None:
    """Losses, norms and dtypes of FSDP2 with the same policy, defaults included."""
    policy = POLICIES[name]
    runs = []
    for function in (torch_fully_shard, fully_shard):
        model = shard(build(), function, mp_policy=policy)
        runs.append((model, train(model, [tokens_for(s, rank) for s in range(3)])))
    (theirs, expected), (ours, found) = runs
    assert found.losses == expected.losses
    assert_same_parameters(ours, theirs, exact=True)


@dataclass
class Batch:
    """An input that hooks have to look into."""

    values: Tensor
    labels: Tensor
    name: str


class Nested(nn.Module):
    """Takes and gives nested structures, and notes the dtypes it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, batch: Batch, *others: tuple[Tensor, Any], **named: Tensor) -> dict[str, Any]:
        self.seen = {
            "values": batch.values.dtype,
            "labels": batch.labels.dtype,
            "others": others[0][0].dtype,
            "mask": named["mask"].dtype,
            "scale": named["scale"].dtype,
        }
        out = self.linear(batch.values) * named["scale"] + others[0][0]
        return {"out": [out, (out.sum(),)], "labels": batch.labels, "name": batch.name}


@pytest.mark.parametrize("casts", [True, False], ids=["cast", "not cast"])
@ranks(2)
def test_inputs_and_outputs_are_cast_wherever_they_are(rank: int, size: int, casts: bool) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=BF16, output_dtype=torch.float64, cast_forward_inputs=casts
    )
    model: Any = fully_shard(Nested(), mp_policy=policy)
    dtype = torch.float32 if casts else BF16
    batch = Batch(torch.ones(2, 4, dtype=dtype, requires_grad=True), torch.arange(2), "first")
    found = model(
        batch,
        (torch.ones(4, dtype=dtype), "text"),
        mask=torch.tensor([True]),
        scale=torch.ones(1, dtype=dtype),
    )
    assert model.seen == {
        "values": BF16,
        "labels": torch.int64,
        "others": BF16,
        "mask": torch.bool,
        "scale": BF16,
    }
    assert found["out"][0].dtype == found["out"][1][0].dtype == torch.float64
    assert found["labels"].dtype == torch.int64
    assert found["name"] == "first"
    found["out"][1][0].backward()
    assert model.linear.weight.grad.dtype == torch.float32
    assert batch.values.grad is not None
    assert batch.values.grad.dtype == dtype


@ranks(2)
def test_every_unit_has_a_policy_of_its_own(rank: int, size: int) -> None:
    """Norms in fp32 inside a bf16 model, as units of their own."""
    model: Any = build(width=24, hidden=30, layers=2)
    low = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    seen: list[torch.dtype] = []
    for block in model.blocks:
        fully_shard(block.norm, mp_policy=MixedPrecisionPolicy(output_dtype=BF16))
        block.norm.register_forward_hook(lambda m, a, out: seen.append(m.weight.dtype))
        fully_shard(block, mp_policy=low)
    fully_shard(model, mp_policy=low)
    loss_of(model, tokens_for(0, rank)).backward()
    assert seen == [torch.float32] * 2
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
    dtypes = {g.name: str(g.dtypes) for g in describe(model).groups}
    assert dtypes["blocks.0"] == "float32 / bfloat16 / float32"
    assert dtypes["blocks.0.norm"] == "float32 / float32 / float32"


def scaled(rank: int, size: int, function: Callable[..., Any]) -> tuple[list[Tensor], list[float]]:
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    model = function(nn.Linear(6, 3), mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(5):
        x = torch.full((2, 6), 0.1 * (rank + 1) + step)
        if step == 2 and rank == size - 1:
            x[0, 0] = float("inf")  # one rank alone overflows
        scaler.scale(model(x).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return [full(p.detach()).clone() for p in model.parameters()], scales


@ranks(2)
def test_a_gradient_scaler_skips_the_step_on_all_ranks(rank: int, size: int) -> None:
    ours, scales = scaled(rank, size, fully_shard)
    theirs, expected = scaled(rank, size, torch_fully_shard)
    assert scales == expected
    assert scales[2] < scales[1], "the overflow of one rank was not seen on this one"
    for a, b in zip(ours, theirs, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b)


@ranks(4)
def test_fp16_sums_do_not_overflow(rank: int, size: int) -> None:
    """Sums of fp16 gradients near its largest value do not overflow."""
    model: Any = nn.Linear(2, 2, bias=False).to(torch.float16)
    fully_shard(model)
    model(torch.full((1, 2), 30000.0, dtype=torch.float16)).sum().backward()
    assert torch.equal(full(model.weight.grad), torch.full((2, 2), 30000.0, dtype=torch.float16))


@ranks(2)
def test_gradients_are_none_or_zero_as_asked(rank: int, size: int) -> None:
    model: Any = fully_shard(nn.Linear(3, 3))
    for set_to_none in (True, False):
        model(torch.ones(1, 3)).sum().backward()
        gradient = model.weight.grad
        model.zero_grad(set_to_none=set_to_none)
        assert (model.weight.grad is None) is set_to_none
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is gradient, "added in place"
    torch.testing.assert_close(full(gradient), torch.ones(3, 3))
