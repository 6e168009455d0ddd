"""The methods a sharded module gains."""

from polyshard.module.sharded import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    mix_in,
    refuse_deepcopy,
    share_comm_ctx,
)

__all__ = [
    "FSDPModule",
    "GradientReductionHandle",
    "UnshardHandle",
    "mix_in",
    "refuse_deepcopy",
    "share_comm_ctx",
]
