"""What really leaves a process, whatever anybody says of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Counts messages and bytes of gathers (sends) and reductions (exchanges).

    Not the few bytes by which ranks tell each other which gradients they have.
    """
    seen = {"sends": 0, "send_bytes": 0, "exchanges": 0, "exchange_bytes": 0}
    send, exchange = dist.ProcessGroup.send, dist.ProcessGroup.alltoall_base

    def counting_send(group: Any, tensors: list[Tensor], *args: Any) -> Any:
        if all(t.dtype == torch.int64 and t.nbytes <= 64 for t in tensors):
            return send(group, tensors, *args)
        seen["sends"] += 1
        seen["send_bytes"] += sum(t.nbytes for t in tensors)
        assert all(t.dtype == torch.uint8 for t in tensors)
        return send(group, tensors, *args)

    def counting_exchange(group: Any, output: Tensor, input_: Tensor, *args: Any) -> Any:
        seen["exchanges"] += 1
        rows = input_.shape[0]
        seen["exchange_bytes"] += input_.nbytes * (rows - 1) // rows
        return exchange(group, output, input_, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.ProcessGroup, "send", counting_send)
        patch.setattr(dist.ProcessGroup, "alltoall_base", counting_exchange)
        yield seen
