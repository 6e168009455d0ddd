"""A composable fully-sharded data-parallel engine for PyTorch."""

from polyshard.__about__ import __version__
from polyshard.api import fully_shard
from polyshard.contract import Contract, Plugin
from polyshard.describe import describe, stats
from polyshard.markers import HOOK_API, hookimpl
from polyshard.module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from polyshard.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

__all__ = [
    "HOOK_API",
    "CPUOffloadPolicy",
    "Contract",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Plugin",
    "UnshardHandle",
    "__version__",
    "describe",
    "fully_shard",
    "hookimpl",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "stats",
]
