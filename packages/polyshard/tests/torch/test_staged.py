"""Private torch names of copies of sharded tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from polyshard._torch.staged import checkpoint_name, with_local
from polyshard.testing import ranks


@ranks(2)
def test_a_copy_has_the_layout_and_memory_of_its_own(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
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
