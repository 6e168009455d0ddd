"""A composable fully-sharded data-parallel engine for PyTorch.

Names are imported when they are first used, so that ``polyshard.markers`` and the command line
do not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from polyshard.__about__ import __version__

if TYPE_CHECKING:
    from polyshard.api import fully_shard
    from polyshard.calibration import Calibration
    from polyshard.clipping import clip_grad_norm_, grad_norm
    from polyshard.contract import Contract, Plugin
    from polyshard.description import describe, stats
    from polyshard.markers import HOOK_API, hookimpl
    from polyshard.module import (
        FSDPModule,
        UnshardHandle,
        register_fsdp_forward_method,
        share_comm_ctx,
    )
    from polyshard.native_state import attach_optimizer
    from polyshard.placement import ShardPlacement
    from polyshard.policies import (
        CPUOffloadPolicy,
        DataParallelMeshDims,
        MixedPrecisionPolicy,
        OffloadPolicy,
    )
    from polyshard.same_values import SameValues

__all__ = [
    "HOOK_API",
    "CPUOffloadPolicy",
    "Calibration",
    "Contract",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Plugin",
    "SameValues",
    "ShardPlacement",
    "UnshardHandle",
    "__version__",
    "attach_optimizer",
    "clip_grad_norm_",
    "describe",
    "fully_shard",
    "grad_norm",
    "hookimpl",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "stats",
]

_HOMES = {
    "CPUOffloadPolicy": "policies",
    "Calibration": "calibration",
    "Contract": "contract",
    "DataParallelMeshDims": "policies",
    "FSDPModule": "module",
    "HOOK_API": "markers",
    "MixedPrecisionPolicy": "policies",
    "OffloadPolicy": "policies",
    "Plugin": "contract",
    "SameValues": "same_values",
    "ShardPlacement": "placement",
    "UnshardHandle": "module",
    "attach_optimizer": "native_state",
    "clip_grad_norm_": "clipping",
    "describe": "description",
    "fully_shard": "api",
    "grad_norm": "clipping",
    "hookimpl": "markers",
    "register_fsdp_forward_method": "module",
    "share_comm_ctx": "module",
    "stats": "description",
}


if not TYPE_CHECKING:  # else every misspelt name would have a type

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'polyshard' has no attribute '{name}'")
        value = getattr(importlib.import_module(f"polyshard.{_HOMES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
