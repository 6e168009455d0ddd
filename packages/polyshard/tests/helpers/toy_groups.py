"""A group as plugins see it, without processes or tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from polyshard.plugins.contributions import Contributions
from polyshard.plugins.seams import GroupIdentity, GroupInfo, ParamInfo
from polyshard.plugins.stack import build_stack

NO_MESH: Any = None
PARAM = ParamInfo("w", (2, 3), torch.float32, True, NO_MESH, nn.Linear)
GROUP = GroupInfo(
    identity=GroupIdentity("block"),
    parameters=(PARAM,),
    mesh=NO_MESH,
    rank=0,
    world_size=2,
    device=torch.device("cpu"),
    orig_dtype=torch.float32,
    param_dtype=torch.float32,
    reduce_dtype=torch.float32,
)


def contributions(*plugins: object) -> Contributions:
    """What a stack of ``plugins`` says about ``GROUP``."""
    return build_stack(plugins).contributions(GROUP)
