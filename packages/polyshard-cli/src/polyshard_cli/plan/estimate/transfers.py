"""Memory and bytes of a group's transfers, from the engine's plan alone."""

from __future__ import annotations

import torch

from polyshard.group.plan import GroupPlan

__all__ = [
    "accumulated_bytes",
    "copied_by_gathers",
    "copied_by_reductions",
    "gather_scratch",
    "kept_scratch",
    "native_gather_bytes",
    "reduce_scratch",
    "sent_dtype",
]


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


def gather_scratch(plan: GroupPlan) -> int:
    """Bytes beside the unsharded parameters while a gather is under way."""
    layout, payload = plan.layout, plan.payloads.gather
    if layout.world_size == 1 and payload is None:
        return 0
    if payload is not None:
        return (layout.world_size + 1) * payload
    return layout.world_size * layout.staged_numel * plan.dtypes.param.itemsize


def kept_scratch(plan: GroupPlan) -> int:
    """Bytes that a codec keeps all the time: rows that decoded chunks are copied home from."""
    if plan.payloads.gather is None:
        return 0
    return plan.layout.world_size * _staged_chunks(plan) * plan.dtypes.param.itemsize


def reduce_scratch(plan: GroupPlan) -> int:
    """Bytes beside gradients and their sums while a reduction is under way."""
    layout, payload = plan.layout, plan.payloads.reduce
    world = layout.world_size
    if payload is not None:
        return 2 * world * payload
    if world == 1:
        return 0
    packed = world * layout.reduced_numel * plan.dtypes.param.itemsize
    if plan.roles.transport.startswith("gloo"):
        # The first peer's arrive in the sum, if they are of its dtype; others' beside it.
        beside = world - 1 - (plan.dtypes.param == plan.dtypes.reduce)
        return packed + beside * layout.shard_numel * plan.dtypes.param.itemsize
    if plan.dtypes.param == plan.dtypes.reduce:
        return packed + sum(_padding(plan, index) for index in layout.direct)
    direct = sum(layout.parameters[index].region_numel for index in layout.direct)
    cast = direct + world * layout.reduced_numel
    return packed + cast * plan.dtypes.reduce.itemsize


def native_gather_bytes(plan: GroupPlan) -> int:
    """Bytes that a gather would send without a codec, at most."""
    return (plan.layout.world_size - 1) * plan.layout.shard_numel * plan.dtypes.param.itemsize


def _padding(plan: GroupPlan, index: int) -> int:
    """An uneven gradient is copied to where padding can follow it."""
    placed = plan.layout.parameters[index]
    return 0 if placed.is_even else placed.region_numel * plan.dtypes.reduce.itemsize


def _staged_chunks(plan: GroupPlan) -> int:
    return sum(plan.layout.parameters[index].chunk_numel for index in plan.layout.staged)
