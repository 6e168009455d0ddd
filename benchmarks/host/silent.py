"""torch's fake process group without the copies it makes, so that what is left is the engine's.

A fake all-gather does not wait, but fills the slot of every rank in turn: on CPU 7 ms at 4096
ranks, which is more than an engine spends on a group, and on CUDA a launch for each. Here the
operators behind it return at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

SINGLE = ("_allgather_base_", "_reduce_scatter_base_")
COALESCED = ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_")


@contextmanager
def silent_group(ranks: int) -> Iterator[None]:
    """Rank 0 of ``ranks`` in one process; collectives leave their outputs as they are."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    library = torch.library.Library("c10d", "IMPL")
    try:
        done = _finished_work(ranks)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*overrid")
            for key in ("CPU", "CUDA"):
                for name in SINGLE:
                    library.impl(name, lambda output, *_: (output, done), key)
                for name in COALESCED:
                    library.impl(name, lambda *_: done, key)
        yield
    finally:
        library._destroy()
        dist.destroy_process_group()


def _finished_work(ranks: int) -> Any:
    """What an operator of c10d returns besides its output; only c10d can make one."""
    group = dist.group.WORLD
    assert group is not None
    out, shard = torch.zeros(ranks), torch.zeros(1)
    return torch.ops.c10d._allgather_base_(out, shard, group.boxed(), False, -1)[1]
