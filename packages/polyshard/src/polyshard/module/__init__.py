"""The methods a sharded module gains."""

from polyshard.module.handles import GradientReductionHandle, UnshardHandle
from polyshard.module.sharded import FSDPModule, mix_in, refuse_deepcopy, share_comm_ctx

__all__ = [
    "FSDPModule",
    "GradientReductionHandle",
    "UnshardHandle",
    "mix_in",
    "refuse_deepcopy",
    "share_comm_ctx",
]
