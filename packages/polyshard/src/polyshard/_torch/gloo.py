"""Process groups that run on gloo, and collectives of torch's that are under way."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives, distributed_c10d

from polyshard._torch.optimizers import local_of

BESIDE = "polyshard beside training"
"""Description of groups that other threads use at their own pace."""


def gather_options() -> Any:
    """Default options of an all-gather of :func:`connect_gloo`'s."""
    return distributed_c10d.AllgatherOptions()


def backend_on_cpu(group: dist.ProcessGroup) -> object:
    """What ``group`` does its work on the CPU with; ``None`` if nothing."""
    try:
        return group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None


def await_values(tensor: Tensor) -> None:
    """Wait for a collective of torch's whose result ``tensor`` is, or holds; on a GPU, in order.

    Else whatever uses the result first waits for it.
    """
    local = local_of(tensor)
    if isinstance(local, _functional_collectives.AsyncCollectiveTensor):
        local.trigger_wait()


def gloo_groups() -> dict[str, dist.ProcessGroup]:
    """The process groups of this process that run on gloo on the CPU, by names.

    All ranks of a group know it by the same name, and no other group has it.
    """
    return {
        f"{name}/{dist.get_process_group_ranks(group)[0]}": group
        for group, name in list(distributed_c10d._world.pg_names.items())
        if isinstance(backend_on_cpu(group), dist.ProcessGroupGloo)
    }
