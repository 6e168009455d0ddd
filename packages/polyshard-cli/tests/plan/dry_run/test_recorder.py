"""What a block computes is booked once, whichever ranks divide it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polyshard_cli.plan import Settings, parse_mesh
from polyshard_cli.plan.drafting import planned, probed, subject_of
from polyshard_cli.plan.dry_run.probing import Account


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
