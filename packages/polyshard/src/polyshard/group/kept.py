"""What stayed unsharded over the end of a turn is compared with the shards before it is used again.

[Note: kept parameters]
A root told not to free its parameters after backward, blocks that stay gathered in evaluation, or
somebody's own ``unshard()``: whatever is found unsharded when an outermost forward starts may be
out of date (see [Note: turns] of the freshness). Every rank compares its own part, and since ranks
gather together they decide together: one all-reduce of a byte a group, in each process group that
has any, and a group that differs on one rank is gathered anew on all. A forward that finds
everything sharded does nothing of this. On an accelerator the answer is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from polyshard.alarm.failures import FailureReport
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport.sums import all_reduce


class KeptGroup(Protocol):
    """A group whose parameters are unsharded, made of shards that may have changed since."""

    roles: MeshRoles
    device: torch.device

    @property
    def name(self) -> str:
        """As plans and errors call the group."""
        ...

    def differs(self) -> Tensor:
        """Whether this rank's shard is not what is unsharded (a 0-dim bool)."""
        ...

    def vouch(self) -> None:
        """Take the unsharded parameters for current: they equal the shards on all ranks."""
        ...

    def reshard(self) -> None:
        """Free the unsharded parameters."""
        ...


def free_outdated(groups: Iterable[KeptGroup]) -> None:
    """Reshard those of ``groups``, all unsharded, whose shards changed on any rank."""
    together: dict[tuple[int, ...], list[KeptGroup]] = {}
    for group in groups:
        together.setdefault(group.roles.shard_ranks, []).append(group)
    for members in together.values():
        for group, is_outdated in zip(members, _outdated(members), strict=True):
            if is_outdated:
                group.reshard()
            else:
                group.vouch()


def _outdated(groups: list[KeptGroup]) -> list[bool]:
    """Of groups that share their shard axis: which ones differ on any of its ranks."""
    roles, names = groups[0].roles, ", ".join(group.name for group in groups)
    with FailureReport(names):
        flags = torch.stack([group.differs().to(group.device) for group in groups])
        flags = flags.to(torch.uint8)
        if roles.shard_size > 1:
            all_reduce(flags, roles.shard_group, dist.ReduceOp.MAX)
        return [bool(flag) for flag in flags.tolist()]
