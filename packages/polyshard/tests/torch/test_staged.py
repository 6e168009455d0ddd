"""Private torch names of copies of sharded tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from polyshard._torch.staged import checkpoint_name, plan_for_all, with_local
from polyshard_checkpoint.survivors import missing_of
from polyshard_testing import ranks


@ranks(2)
def test_a_copy_has_the_layout_and_memory_of_its_own(rank: int, size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    value = DTensor.from_local(torch.full((2, 3), float(rank)), mesh, [Shard(0)])
    local = torch.ones(2, 3, device="meta")
    copied = with_local(value, local)
    assert copied.to_local().device.type == "meta", "not moved to the mesh's device"
    assert (copied.shape, copied.placements) == (value.shape, value.placements)


def test_wrappers_are_no_part_of_names() -> None:
    inner: Any = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    model = nn.Sequential(inner)
    names = [checkpoint_name(model, name) for name, _ in model.named_parameters()]
    assert names == ["0.0.weight", "0.0.bias"]


def test_a_plan_for_all_writes_nothing_twice_and_may_lack_something() -> None:
    planners = [DefaultSavePlanner() for _ in range(2)]
    plans = []
    for planner in planners:
        planner.set_up_planner({"a": {"b": torch.ones(2)}, "c": 3}, None, False)
        plans.append(planner.create_local_plan())
    every, metadata = plan_for_all(plans)
    assert sorted(item.index.fqn for plan in every for item in plan.items) == ["a.b", "c"]
    assert set(metadata.state_dict_metadata) == {"a.b", "c"}
    assert metadata.planner_data["a.b"] == ("a", "b")
    item = next(i for i in plans[0].items if i.index.fqn == "a.b")
    assert item.tensor_data is not None
    part = replace(item.tensor_data, size=torch.Size([5]))
    lacking = SavePlan([replace(item, tensor_data=part)], planner_data={})
    saved = plan_for_all([lacking])[1].state_dict_metadata["a.b"]
    assert isinstance(saved, TensorStorageMetadata)
    assert saved.size == torch.Size([5])
    (said,) = missing_of([lacking])
    assert said == "a.b [5] lacks [2:5] of dim 0"
