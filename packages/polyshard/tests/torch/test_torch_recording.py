"""Private names of torch that the recording device uses."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from polyshard._torch import recording
from polyshard_testing.streams import recorded


def test_storages_are_told_apart_and_operations_seen() -> None:
    seen = []

    class Mode(recording.DispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    one, other = torch.ones(2), torch.ones(2)
    with Mode():
        view: Tensor = one.view(2)
        with recording.unwatched():
            one.add_(1)
    assert [str(func) for func in seen] == ["aten.view.default"]
    number = recording.storage_id
    assert number(one.untyped_storage()) == number(view.untyped_storage())
    assert number(one.untyped_storage()) != number(other.untyped_storage())


def test_groups_made_in_python_have_names() -> None:
    with recorded(4):
        mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("a", "b"))
        groups = [mesh.get_group(name) for name in ("a", "b")]
        names = {recording.registered_name(group) for group in groups}
        assert names == {group.group_name for group in groups}
        assert len(names) == 2
        assert all(isinstance(group, recording.GroupBase) for group in groups)
