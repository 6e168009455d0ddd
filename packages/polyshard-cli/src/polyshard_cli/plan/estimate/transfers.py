"""Bytes around a group's transfers: sums of micro-batches, casts and copies."""

from __future__ import annotations

import torch

from polyshard.planning import GroupPlan


def sent_dtype(plan: GroupPlan) -> torch.dtype:
    """Of gradients that are reduced after each backward."""
    param, reduce = plan.dtypes.param, plan.dtypes.reduce
    return reduce if param.itemsize >= reduce.itemsize else param


def accumulated_bytes(plan: GroupPlan) -> int:
    """Of unsharded gradients that wait for the last micro-batch, in the reduce dtype."""
    return sum(
        placed.numel * plan.dtypes.reduce.itemsize
        for placed, info in zip(plan.layout.parameters, plan.parameters, strict=True)
        if info.requires_grad
    )


def copied_by_gathers(plan: GroupPlan) -> int:
    """Bytes read and written to cast a shard, and to bring what was packed where it belongs.

    None with a codec, which reads and writes everything itself.
    """
    if plan.payloads.gather is not None:
        return 0
    layout, param, orig = plan.layout, plan.dtypes.param, plan.dtypes.orig
    cast = layout.shard_numel * (orig.itemsize + param.itemsize) if param != orig else 0
    return cast + 2 * layout.world_size * layout.staged_numel * param.itemsize


def copied_by_reductions(plan: GroupPlan) -> int:
    """Bytes read and written to pack gradients."""
    if plan.payloads.reduce is not None:
        return 0
    layout = plan.layout
    return 2 * layout.world_size * layout.reduced_numel * plan.dtypes.param.itemsize


def native_gather_bytes(plan: GroupPlan) -> int:
    """Bytes that a gather would send without a codec, at most."""
    return (plan.layout.world_size - 1) * plan.layout.shard_numel * plan.dtypes.param.itemsize
