"""What only some versions of torch have: asked of the installed one's behaviour."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from toy_models import full

from polyshard import MixedPrecisionPolicy, fully_shard
from polyshard._torch import newer
from polyshard.errors import UnsupportedError
from polyshard.module.schedule import own_unit
from polyshard.transport import backend_for, choose_transport
from polyshard_checkpoint import CheckpointReader
from polyshard_testing import World, ranks

CPU = torch.device("cpu")


def rounded(function: Any, rank: int) -> torch.Tensor:
    """A gradient in which one can see whether bf16 sums were rounded before the mean."""
    model = function(nn.Linear(1, 4, bias=False), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    model(torch.full((1, 1), 1.0 + rank / 128)).sum().backward()
    return full(model.weight.grad)


@ranks(2)
def test_the_default_of_reduce_dtype_is_what_torch_does(rank: int, size: int) -> None:
    theirs = rounded(torch_fsdp.fully_shard, rank)
    assert torch.equal(rounded(fully_shard, rank), theirs)
    exact = torch.equal(theirs, torch.full((4, 1), 1.0 + 1 / 256))
    assert exact is newer.reduces_in_original_dtype()


@ranks(2)
def test_sharded_gradients_after_a_reset(rank: int, size: int) -> None:
    model: Any = torch_fsdp.fully_shard(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    model.reset_iter_state()
    assert (model.weight.grad is None) is newer.resets_sharded_gradients()


@pytest.mark.thorough  # Python compiles all of torch anew for it
def test_nothing_is_read_from_documentation() -> None:
    """The same answers without docstrings, which ``python -OO`` strips."""
    code = (
        "from polyshard._torch import newer;"
        "print(newer.reduces_in_original_dtype(), newer.resets_sharded_gradients())"
    )
    command = [sys.executable, "-OO", "-c", code]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said == f"{newer.reduces_in_original_dtype()} {newer.resets_sharded_gradients()}\n"


def test_no_source_names_documentation() -> None:
    """What the test above shows, without a second Python: ``python -OO`` strips docstrings."""
    sources = sorted(Path(newer.__file__).parent.glob("*.py"))
    assert [s.name for s in sources if re.search("__doc__|getdoc", s.read_text("utf-8"))] == []


@pytest.mark.skipif(
    not getattr(dist, "_is_spmd_types_available", bool)(),
    reason="spmd_types is not installed, or this torch does not look at it",
)
@ranks(2)
@pytest.mark.parametrize("kind", ["R", "S", "I"])
def test_what_spmd_types_says_is_not_passed_over(rank: int, size: int, kind: str) -> None:
    import spmd_types
    from spmd_types.checker import typecheck

    mesh = init_device_mesh(torch.get_default_device().type, (size,), mesh_dim_names=("tp",))
    axis = spmd_types.MeshAxis.of(mesh.get_group("tp"))
    model = nn.Linear(4, 4)
    with typecheck(), spmd_types.set_current_mesh(mesh):
        told = spmd_types.S(0) if kind == "S" else getattr(spmd_types, kind)
        spmd_types.assert_type(model.weight, {axis: told})
    if kind == "R":
        fully_shard(model)
        return
    with pytest.raises(UnsupportedError, match=r"'weight' is annotated by spmd_types \(.+\)"):
        fully_shard(model)


def mixed_backends(rank: int, size: int) -> None:
    """A group with a backend per device, and one whose name is not compared here."""
    mixed = dist.new_group(backend="cpu:gloo,cuda:gloo")
    assert isinstance(mixed, dist.ProcessGroup)
    assert newer.backend_of(mixed, CPU) == backend_for(mixed, CPU) == "gloo"
    assert newer.backend_of(mixed, torch.device("cuda")) == "gloo"
    assert newer.backend_of(mixed, torch.device("xpu")) == ""
    assert not newer.coalesces(mixed, CPU)
    mesh = dist.DeviceMesh.from_group(mixed, "cpu")
    model: Any = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    fully_shard(model, mesh=mesh)
    model(torch.ones(1, 4)).sum().backward()
    assert torch.equal(full(model.weight.detach()), before)
    roles = own_unit(model).roles
    assert choose_transport(roles, CPU).name == "gloo-p2p"


def uneven_numbers_of_groups(rank: int, size: int) -> None:
    """One rank alone made a group of its own: names differ from here on, results do not."""
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    names = [None] * size
    dist.all_gather_object(names, newer.name_of_next_group())
    assert len({*names}) == 2, "torch would name the next group differently"
    model: Any = fully_shard(nn.Linear(4, 4), mesh=mesh)
    tags = [None] * size
    model(torch.ones(1, 4)).sum().backward()
    lines = [line for g in own_unit(model).groups for line in _compared(g)]
    dist.all_gather_object(tags, lines)
    assert tags[0] == tags[1], "what ranks compare contains no name of a process group"


def _compared(group: Any) -> tuple[str, ...]:
    from polyshard.group.planner import plan_of

    return plan_of(group, frees=True).lines()


@pytest.mark.parametrize("function", [mixed_backends, uneven_numbers_of_groups])
def test_process_groups(function: Any) -> None:
    world = World(2)
    try:
        world.run(function)
    finally:
        world.close()


class Coalescing:
    """A backend of whatever name that coalesces."""

    supports_coalescing = True


def test_backends_are_asked_and_not_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        def _get_backend(self, device: torch.device) -> Any:
            return Coalescing() if device.type == "cuda" else object()

    group: Any = Group()
    assert newer.coalesces(group, torch.device("cuda"))
    assert not newer.coalesces(group, CPU)


def six_facts(self: TensorProperties) -> tuple[Any, ...]:
    return (*FACTS(self)[:5], (1,))


FACTS: Any = TensorProperties.__getstate__


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_checkpoints_of_a_newer_torch_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch 2.15 writes six facts of a tensor where older versions expect five."""
    with monkeypatch.context() as newest:
        newest.setattr(TensorProperties, "__getstate__", six_facts)
        dcp.save({"a": torch.arange(3.0)}, checkpoint_id=tmp_path, no_dist=True)
    loaded = {"a": torch.zeros(3)}
    dcp.load(loaded, storage_reader=CheckpointReader(tmp_path), no_dist=True)
    assert loaded["a"].tolist() == [0.0, 1.0, 2.0]
    found: Any = CheckpointReader(tmp_path).read_metadata().state_dict_metadata["a"]
    assert type(found.properties) is TensorProperties
    assert found.properties.dtype == torch.float32


@ranks(2)
def test_meshes_are_forgotten(rank: int, size: int) -> None:
    """torch keeps the steps between placements by mesh, and with the mesh its process groups."""
    mesh = init_device_mesh(torch.get_default_device().type, (size, 1), mesh_dim_names=("a", "b"))
    for source in (Partial("max"), Partial("sum")):
        value = DTensor.from_local(torch.ones(4), mesh, [source, source])
        value.redistribute(mesh, [Replicate(), Replicate()])
    known = weakref.ref(mesh)
    del mesh, value
    newer.forget_shardings()
    gc.collect()
    assert known() is None
