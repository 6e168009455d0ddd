"""Private torch names that checkpoints need."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.tensor import DTensor

from polyshard._torch.private import wrap_local


def with_local(value: DTensor, local: Tensor) -> DTensor:
    """A DTensor like ``value`` around ``local``, which may be on another device than its mesh.

    ``DTensor.from_local`` would move it there.
    """
    return wrap_local(local, value._spec)


def checkpoint_name(model: nn.Module, name: str) -> str:
    """What torch's state-dict helpers call a parameter: without what wrappers add to its name."""
    (found,) = _get_fqns(model, name)
    return found
