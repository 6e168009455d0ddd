"""Private torch names of copies of sharded tensors."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from polyshard._torch.staged import with_local
from polyshard.testing import ranks


@ranks(2)
def test_a_copy_has_the_layout_and_memory_of_its_own(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    value = DTensor.from_local(torch.full((2, 3), float(rank)), mesh, [Shard(0)])
    local = torch.ones(2, 3, device="meta")
    copied = with_local(value, local)
    assert copied.to_local().device.type == "meta", "not moved to the mesh's device"
    assert (copied.shape, copied.placements) == (value.shape, value.placements)
