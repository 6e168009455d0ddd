"""torch's other engines, for the rows that they can train: DDP and FSDP1."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

Wrapper = Callable[[nn.Module, type[nn.Module], torch.dtype | None], nn.Module]


def _ddp(model: nn.Module, block: type[nn.Module], compute: torch.dtype | None) -> nn.Module:
    del block
    assert compute is None, "DDP computes in the dtype of the parameters"
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _fsdp1(model: nn.Module, block: type[nn.Module], compute: torch.dtype | None) -> nn.Module:
    precision = MixedPrecision(param_dtype=compute, reduce_dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is old
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({block}),
            mixed_precision=precision if compute else None,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )


WRAPPERS: dict[str, Wrapper] = {"ddp": _ddp, "fsdp1": _fsdp1}
