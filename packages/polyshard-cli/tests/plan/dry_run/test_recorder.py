"""What a block computes is booked once, whichever ranks divide it, and blocks are told apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from polyshard_cli.plan import Settings, parse_mesh
from polyshard_cli.plan.drafting import planned, probed, subject_of
from polyshard_cli.plan.dry_run.probing import Account, Cost, probe
from polyshard_cli.plan.dry_run.units import units_of


def flops(account: Account) -> int:
    return sum(count * kernel.flops for kernel, count in account.kernels.items())


def test_two_ranks_of_a_tensor_axis_share_the_products() -> None:
    """``DTensor`` looks up shapes of whole tensors once; that is nothing a rank computes."""
    pytest.importorskip("polyshard_tensor_parallel")
    whole = Settings(model="plan_models:divided", mesh=parse_mesh("dp=2"), sequence=16, batch=2)
    plan = "polyshard_tensor_parallel:demo_plan"
    half = replace(whole, mesh=parse_mesh("dp=2,tp=2"), tp_plan=plan)
    costs = []
    for settings in (whole, half):
        subject = subject_of(settings)
        planned(subject, settings)
        costs.append(probed(subject, settings).units["blocks.0"])
    assert flops(costs[0].forward) == 2 * flops(costs[1].forward)
    assert flops(costs[0].backward) == 2 * flops(costs[1].backward)


class Block(nn.Module):
    def __init__(self, *, stride: int = 1, recompute: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 1, stride)
        self.recompute = recompute

    @override
    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(self._inner, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self._inner(x)

    def _inner(self, x: Tensor) -> Tensor:
        return self.conv(x).exp().exp()  # type: ignore[no-any-return]


class Branches(nn.Module):
    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return sum((block(x).mean() for block in self.blocks), x.new_zeros(()))


@pytest.mark.parametrize("other", [{"stride": 2}, {"recompute": True}])
def test_blocks_of_equal_shapes_that_compute_otherwise(other: dict[str, int]) -> None:
    def costs(*settings: dict[str, int]) -> list[Cost]:
        with torch.device("meta"):
            model = Branches(*(Block(**one) for one in settings))  # type: ignore[arg-type]
            found = probe(model, units_of(model), torch.zeros(2, 4, 64))
        assert not found.problem
        return list(found.units.values())

    plain, odd = costs({}, other)
    assert (plain.saved_bytes, odd.saved_bytes) == (
        costs({})[0].saved_bytes,
        costs(other)[0].saved_bytes,
    )
    assert plain.saved_bytes > odd.saved_bytes
