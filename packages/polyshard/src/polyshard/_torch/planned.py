"""Ranks that are not there: one process that plans for many, over torch's fake process group.

[Note: planned ranks]
torch's fake backend moves nothing, so that one process can be any rank of a world of any size.
Plans depend on the backend, though: point to point or collectives, padded or not. So it is
registered once more under a name for each backend that it stands for, and what chooses a transport
looks there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist

from polyshard._torch.newer import forget_shardings

PREFIX = "fake-"

Planned = Literal["gloo", "nccl"]


def stands_for(backend: str) -> str | None:
    """The backend that one of this name is planned for; ``None`` for a real one."""
    return backend.removeprefix(PREFIX) if backend.startswith(PREFIX) else None


@contextmanager
def planned_ranks(ranks: int, backend: Planned, rank: int = 0) -> Iterator[None]:
    """Have this process be ``rank`` of so many, without the others; it must have no process group.

    Args:
        ranks: of the world.
        backend: what they would communicate over.
        rank: which of them to be.
    """
    # Late: only planning needs what torch keeps for its tests.
    from torch.testing._internal.distributed.fake_pg import FakeStore, _create_fake_pg

    name = f"{PREFIX}{backend}"
    if not hasattr(dist.Backend, name.upper()):
        # Of all devices, however few are here, and of one that an extension has added.
        here = torch.accelerator.current_accelerator()
        devices = sorted({"cpu", "cuda", "meta"} | ({here.type} if here else set()))
        dist.Backend.register_backend(name, _create_fake_pg, extended_api=True, devices=devices)
    dist.init_process_group(name, store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_shardings()  # else equal meshes would have answers of groups that never were
