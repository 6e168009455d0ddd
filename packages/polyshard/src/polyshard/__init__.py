"""A composable fully-sharded data-parallel engine for PyTorch."""

from polyshard.__about__ import __version__
from polyshard.api import fully_shard
from polyshard.describe import describe, stats
from polyshard.module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
)
from polyshard.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "__version__",
    "describe",
    "fully_shard",
    "register_fsdp_forward_method",
    "stats",
]
