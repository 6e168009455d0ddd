"""What stayed unsharded over the end of a turn is compared with the shards before it is used again.

[Note: kept parameters]
A root told not to free its parameters after backward, blocks that stay gathered in evaluation, or
somebody's own ``unshard()``: whatever is found unsharded when an outermost forward starts may be
out of date (see [Note: turns] of the freshness). Every rank compares its own part, and since ranks
gather together they decide together: one all-reduce of a byte a group, in each process group that
has any, and a group that differs on one rank is gathered anew on all. A forward that finds
everything sharded does nothing of this. On an accelerator the answer is waited for.

Between micro-batches nothing is compared. A backward that is not the last of its iteration, or that
reduces nothing, *promises* that the shards of what it leaves unsharded hold still until an
optimizer steps. Ranks have to agree on that without a word, so calls of ``step()`` are counted,
which are the same on all: values and version counters differ where a rank has no rows. What is
written by hand meanwhile shows in the first forward that nothing was promised to.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from polyshard.alarm.failures import FailureReport
from polyshard.transport.sums import all_reduce

if TYPE_CHECKING:
    from polyshard.group.group import ParameterGroup


def free_outdated(groups: Iterable[ParameterGroup]) -> None:
    """Reshard those of ``groups``, all unsharded, whose shards changed on any rank."""
    together: dict[tuple[int, ...], list[ParameterGroup]] = {}
    for group in groups:
        together.setdefault(group.roles.shard_ranks, []).append(group)
    for members in together.values():
        for group, is_outdated in zip(members, _outdated(members), strict=True):
            if is_outdated:
                group.reshard()
            else:
                group.vouch()


def _outdated(groups: list[ParameterGroup]) -> list[bool]:
    """Of groups that share their shard axis: which ones differ on any of its ranks."""
    roles, names = groups[0].roles, ", ".join(group.name for group in groups)
    with FailureReport(names):
        flags = torch.stack([group.differs().to(group.device) for group in groups])
        flags = flags.to(torch.uint8)
        if roles.shard_size > 1:
            all_reduce(flags, roles.shard_group, dist.ReduceOp.MAX)
        return [bool(flag) for flag in flags.tolist()]
