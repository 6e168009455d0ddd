"""Small collectives among the ranks of a process group: over a wire where it runs on gloo."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from polyshard._torch.newer import backend_of
from polyshard.transport.wire import wire_of
from polyshard.transport.works import all_gather_over, all_reduce_over


def all_reduce(
    values: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """Reduce ``values`` in place, on all ranks of ``group``; they are ready for the stream.

    Raises:
        ConnectionLostError: when another failure ended it.
    """
    if _has_wire(values, group):
        all_reduce_over(wire_of(group), values, op)
    else:
        dist.all_reduce(values, op, group=group)


def all_gather(rows: Tensor, row: Tensor, group: dist.ProcessGroup) -> None:
    """Row ``r`` of ``rows`` (``[W, n]``) becomes the ``row`` (``[n]``) of rank ``r``.

    Raises:
        ConnectionLostError: when another failure ended it.
    """
    if _has_wire(row, group):
        all_gather_over(wire_of(group), rows, row)
    else:
        dist.all_gather(list(rows.unbind()), row, group=group)


def _has_wire(values: Tensor, group: dist.ProcessGroup) -> bool:
    return values.device.type == "cpu" and backend_of(group, values.device) == dist.Backend.GLOO
