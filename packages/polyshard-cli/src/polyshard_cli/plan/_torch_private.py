"""Private names of torch that a plan needs; tests of traffic and memory run through both."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import _resolve_process_group


def ranks_of_group(name: str) -> int:
    """Ranks of the process group that a functional collective is given by name."""
    group: dist.ProcessGroup = _resolve_process_group(name)  # type: ignore[arg-type]
    return group.size()


def is_fake(tensor: Tensor) -> bool:
    """Whether nothing is computed with it in a run: torch only asks for shapes."""
    return isinstance(tensor, FakeTensor)


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors over the same memory; on the meta device no address tells them apart."""
    key: int = tensor.untyped_storage()._cdata
    return key
