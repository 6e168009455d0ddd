"""A plan with another ``reshard_after_forward``: arithmetic, which saves planning anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from polyshard.sharding.layout import block_padded
from polyshard_cli.plan.dry_run.planning import PlannedGroup

__all__ = ["resharded"]


def resharded(
    groups: Sequence[PlannedGroup], reshard: bool | int | None
) -> tuple[PlannedGroup, ...]:
    """``groups``, planned with ``None``, as ``fully_shard`` would plan them with ``reshard``."""
    if reshard is None:
        return tuple(groups)
    return tuple(_resharded(group, reshard) for group in groups)


def _resharded(group: PlannedGroup, reshard: bool | int) -> PlannedGroup:
    plan = group.plan
    if isinstance(reshard, bool) or plan.layout.world_size <= reshard:
        return replace(group, plan=replace(plan, reshard_after_forward=bool(reshard)))
    # A block keeps the unsharded buffer once, in slices of equal size.
    numel = block_padded(plan.layout.unsharded_numel, reshard) // reshard
    sent = (reshard - 1) * numel * plan.dtypes.param.itemsize
    changed = replace(plan, reshard_after_forward=reshard, regather_bytes=sent)
    return replace(group, plan=changed)
