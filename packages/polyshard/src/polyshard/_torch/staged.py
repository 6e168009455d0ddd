"""Private torch names that checkpoints need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.distributed.checkpoint import Metadata, SavePlan
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
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


def plan_for_all(plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """What each rank is to write, nothing twice, and the metadata of it all.

    As the default planner does it, which besides refuses tensors that are not whole.
    """
    every, metadata = create_default_global_save_plan(dedup_save_plans(list(plans)))
    names = {key: path for plan in every for key, path in plan.planner_data.items()}
    return every, replace(metadata, planner_data=names)
