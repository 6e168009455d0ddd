"""Private torch names that copies of sharded tensors need."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from polyshard._torch.private import wrap_local


def with_local(value: DTensor, local: Tensor) -> DTensor:
    """A DTensor like ``value`` around ``local``, which may be on another device than its mesh.

    ``DTensor.from_local`` would move it there.
    """
    return wrap_local(local, value._spec)
