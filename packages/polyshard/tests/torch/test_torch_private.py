"""Every private torch name that polyshard uses does what polyshard takes it to do."""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from polyshard._torch import newer, private
from polyshard.errors import MeshError
from polyshard_testing import World, ranks


@ranks(2)
def test_dtensors(rank: int, size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    spec = private.dtensor_spec(mesh, (Shard(0),), torch.Size((4, 3)), torch.float32)
    local = torch.full((2, 3), float(rank))
    value = private.wrap_local(local, spec)
    assert private.local_tensor(value) is local
    assert value.shape == (4, 3)
    assert value.full_tensor()[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
    for trains in (True, False):
        parameter = private.wrap_parameter(local, spec, requires_grad=trains)
        wanted = nn.Parameter(value, requires_grad=trains)
        assert isinstance(parameter, nn.Parameter)
        assert parameter.is_leaf
        assert parameter.requires_grad is trains
        assert (type(parameter), parameter.__dict__) == (type(wanted), wanted.__dict__)
        assert parameter._version == wanted._version
        own = private.local_tensor(cast("DTensor", parameter))
        assert own is not local
        assert own.data_ptr() == local.data_ptr()
    kept = cast("Any", value)
    private.become(kept, private.wrap_parameter(local + 1, spec, requires_grad=False))
    assert kept is value
    assert value.to_local()[0, 0] == rank + 1


@ranks(2)
def test_equal_meshes_are_mixed_up_until_they_are_forgotten(rank: int, size: int) -> None:
    first, second = (init_device_mesh(torch.get_default_device().type, (size,)) for _ in range(2))

    def mesh_of_a_result(mesh: DeviceMesh) -> DeviceMesh:
        value: Any = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        return cast("DeviceMesh", (value + value).device_mesh)

    assert mesh_of_a_result(first) is first
    assert mesh_of_a_result(second) is first
    newer.forget_shardings()
    assert mesh_of_a_result(second) is second


@ranks(2)
def test_the_default_store(rank: int, size: int) -> None:
    store = private.default_store()
    assert store is not None
    assert private.store_timeout_seconds(store) > 0
    store.set(f"private/{rank}", "here")
    dist.barrier()
    assert store.get(f"private/{1 - rank}") == b"here"


def test_backward_callbacks_run_once_at_the_end() -> None:
    order: list[str] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def hook(gradient: torch.Tensor) -> None:
        assert private.in_backward()
        private.queue_backward_callback(lambda: order.append("end"))
        order.append("hook")

    y.register_hook(hook)
    x.register_hook(lambda gradient: order.append("leaf"))
    assert not private.in_backward()
    y.sum().backward()
    assert order == ["hook", "leaf", "end"]


def test_spans_exist_only_under_a_profiler() -> None:
    with private.profiler_span("phase", "name"):
        torch.ones(1)
    with torch.profiler.profile(acc_events=True) as profile, private.profiler_span("phase", "name"):
        torch.ones(1)
    assert "phase name" in {event.key for event in profile.key_averages()}


def test_versions_are_preserved() -> None:
    tensor = torch.zeros(2)
    before = tensor._version
    with private.preserve_version(tensor):
        tensor.fill_(1.0)
    assert tensor._version == before
    tensor.fill_(2.0)
    assert tensor._version == before + 1


def test_managed_modules_are_marked_for_compile() -> None:
    module = nn.Linear(1, 1)
    private.tag_managed_module(module)
    assert module._is_fsdp_managed_module
    assert module._fsdp_use_orig_params


def test_the_tensor_protocol_is_found() -> None:
    assert not private.has_fsdp_protocol(torch.ones(1))


def test_coalescing_is_a_block() -> None:
    assert hasattr(dist.distributed_c10d, "_coalescing_manager")


def test_holders_of_memory_are_counted() -> None:
    tensor = torch.empty(10)
    assert private.storage_holders(tensor) == 1
    view = tensor[2:]
    assert private.storage_holders(tensor) == 2
    del view
    assert private.storage_holders(tensor) == 1


def joined(rank: int, size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("a", "b"))
    both = private.join_meshes([mesh["b"], mesh["a"]])
    assert both.mesh_dim_names == ("b", "a")
    assert both.size(0) == both.size(1) == 2
    group = mesh.get_group("a")
    ranks = dist.get_process_group_ranks(group)
    shared = private.shared_group(ranks, "test", group)
    assert private.shared_group(ranks, "test", group) is shared
    assert private.shared_group(ranks, "another", group) is not shared
    assert dist.get_process_group_ranks(shared) == ranks


def waits_alike(rank: int, size: int) -> None:
    """A rank that is gone is waited for as long in the one as in the other."""
    group = dist.new_group(timeout=timedelta(seconds=17))
    shared = private.shared_group(list(range(size)), "test", group)
    assert private.timeout_of(group) == timedelta(seconds=17)
    assert private.timeout_of(shared) == timedelta(seconds=17)


def other_counts(rank: int, size: int) -> None:
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    group: Any = dist.group.WORLD
    with pytest.raises(MeshError, match=r"different numbers of groups before"):
        private.shared_group(list(range(size)), "test", group)


def groups_of_some(rank: int, size: int) -> None:
    """All took part in making a group that one is in: newer torch names the next one alike."""
    dist.new_group([0])
    names: list[str | None] = [None] * size
    dist.all_gather_object(names, newer.name_of_next_group())
    group: Any = dist.group.WORLD
    if len({*names}) == 1:
        shared = private.shared_group(list(range(size)), "some", group)
        ones = torch.ones(1)
        dist.all_reduce(ones, group=shared)
        assert ones.item() == size
    else:
        with pytest.raises(MeshError, match=r"\[0\] and ranks \[1, 2, 3\]|different numbers"):
            private.shared_group(list(range(size)), "some", group)
    assert len({*names}) == 1 or newer.release() < (2, 15)


def test_meshes_are_joined_and_groups_shared() -> None:
    world = World(4)  # with as many groups on every rank
    try:
        world.run(joined)
        world.run(waits_alike)
        world.run(groups_of_some)
        world.run(other_counts)
    finally:
        world.close()


@ranks(4)
def test_meshes_know_their_root_and_placements_their_strides(rank: int, size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    assert private.root_mesh(mesh["tp"]) == mesh
    strided = private.strided_shard(0, 2)
    assert private.is_strided(strided)
    assert not private.is_strided(Shard(0))
    rows = torch.arange(8.0)
    own = rows.chunk(2)[rank % 2].chunk(2)[rank // 2]
    assert torch.equal(
        DTensor.from_local(own, mesh, [strided, Shard(0)], run_check=False).full_tensor(), rows
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_metadata_of_checkpoints_names_known_classes(tmp_path: Path) -> None:
    known = private.metadata_classes()
    named: list[tuple[str, str]] = []

    class Listing(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            named.append((module, name))
            return super().find_class(module, name)

    state = {"a": torch.ones(2), "b": {"c": [1, (2.5, "x")]}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    with (tmp_path / ".metadata").open("rb") as file:
        Listing(file).load()
    others = {(m, n) for m, n in named if (m, n) not in known}
    assert others <= {
        ("torch", "float32"),
        ("builtins", "getattr"),  # Python 3.11.0 to 3.11.3
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
    }
    assert len(named) > 8


def test_rows_of_chunks() -> None:
    tensors = [torch.arange(12.0).view(4, 3), torch.arange(8.0), torch.ones(2, 2, 2)]
    out = torch.empty(2, 14)
    private.chunk_cat(tensors, out)
    wanted = [torch.cat([t.chunk(2)[row].flatten() for t in tensors]) for row in range(2)]
    assert torch.equal(out, torch.stack(wanted))


def test_gates_are_found_whatever_mode_is_on() -> None:
    """Under a mode no operation reaches memory, and what is found is kept for the process."""
    private._gate_words.cache_clear()
    try:
        with FakeTensorMode():
            assert private.gates_work()
    finally:
        private._gate_words.cache_clear()
