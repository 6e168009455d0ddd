"""Every private torch name polyshard uses, so that a new torch is checked in one file.

Each name is exercised by ``tests/test_torch_private.py`` on every torch version supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from polyshard.errors import MeshError

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims
else:
    try:
        from torch.distributed.fsdp import DataParallelMeshDims
    except ImportError:  # torch before 2.12 has no such class, and no keyword that takes it

        @dataclass
        class DataParallelMeshDims:
            """Names of the axes of a mesh that shard and replicate, as in torch 2.12."""

            shard: str | tuple[str, ...] | None = None
            replicate: str | tuple[str, ...] | None = None

            def __post_init__(self) -> None:
                if self.shard is None and self.replicate is None:
                    raise ValueError("at least one of shard and replicate must be given")

            @property
            def shard_names(self) -> tuple[str, ...]:
                """Of the axes that shard."""
                return _names(self.shard)

            @property
            def replicate_names(self) -> tuple[str, ...]:
                """Of the axes that replicate."""
                return _names(self.replicate)


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


__all__ = [
    "DataParallelMeshDims",
    "coalescing",
    "default_store",
    "dtensor_spec",
    "has_fsdp_protocol",
    "in_backward",
    "is_strided",
    "join_meshes",
    "local_tensor",
    "preserve_version",
    "profiler_span",
    "queue_backward_callback",
    "reduces_in_original_dtype",
    "root_mesh",
    "set_local_tensor",
    "shared_group",
    "storage_holders",
    "store_timeout_seconds",
    "strided_shard",
    "tag_managed_module",
    "wrap_local",
]


def dtensor_spec(
    mesh: dist.DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """The spec of a contiguous DTensor of global ``shape``."""
    strides = torch.empty(shape, device="meta").stride()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, strides, dtype))


def join_meshes(meshes: Sequence[dist.DeviceMesh]) -> dist.DeviceMesh:
    """One mesh with the axes of several slices of one root mesh, in order."""
    return dist.DeviceMesh._concatenate(list(meshes))


def wrap_local(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around ``local`` without the checks and views of ``DTensor.from_local``."""
    return DTensor(local, spec, requires_grad=False)


def local_tensor(value: DTensor) -> Tensor:
    """The local tensor itself; ``to_local()`` would return an autograd view of it."""
    return value._local_tensor


def set_local_tensor(value: DTensor, local: Tensor) -> None:
    """Point a DTensor at other local memory, keeping the object (optimizers hold on to it)."""
    value._local_tensor = local


def storage_holders(tensor: Tensor) -> int:
    """How many tensors (and other owners) hold the memory of ``tensor``, itself included."""
    storage = tensor.untyped_storage()
    counted: int = torch._C._storage_Use_Count(storage._cdata)
    return counted - 1  # without ``storage``


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward now running has ended."""
    Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether this thread runs inside an autograd backward (activation checkpointing does)."""
    return torch._C._current_graph_task_id() != -1


def root_mesh(mesh: dist.DeviceMesh) -> dist.DeviceMesh:
    """The mesh that ``mesh`` is a slice of."""
    return mesh._get_root_mesh()


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Sharded on a dim that later axes cut into ``split_factor`` pieces before this one did."""
    return _StridedShard(dim, split_factor=split_factor)


def is_strided(placement: Placement) -> bool:
    """Whether ``placement`` is what :func:`strided_shard` makes."""
    return isinstance(placement, _StridedShard)


def store_timeout_seconds(store: dist.Store) -> float:
    """How long a blocking read of ``store`` waits."""
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]
    return timeout.total_seconds()


def default_store() -> dist.Store | None:
    """The key-value store of the default process group."""
    return distributed_c10d._get_default_store()


def coalescing(group: dist.ProcessGroup, device: torch.device) -> AbstractContextManager[Any]:
    """Launch all collectives of the block as one (on NCCL a single group call)."""
    manager = getattr(distributed_c10d, "_coalescing_manager", None)
    if manager is None:
        return nullcontext()
    # With a device torch opens a group call, which backends on the CPU do not have; without one it
    # collects the collectives and makes one of them at the end.
    where = None if device.type == "cpu" else device
    return cast("AbstractContextManager[Any]", manager(group=group, device=where))


def shared_group(ranks: Sequence[int], purpose: str, like: dist.ProcessGroup) -> dist.ProcessGroup:
    """The process group of ``ranks`` for ``purpose``, made once however many ask for it.

    torch's own registry remembers it, and forgets it when process groups are destroyed. All ranks
    of ``like``, which contains the new group, ask at the same point.

    Raises:
        MeshError: on every rank, where torch would give the group different names and wait for
            ever: it makes the name from the number of groups a rank has.
    """
    label = f"polyshard {purpose} of {like.group_name}"
    known = cast("Mapping[object, dict[int, int]]", distributed_c10d._world.pg_group_ranks)
    for group, members in known.items():
        if not isinstance(group, dist.ProcessGroup):
            continue  # a mark for groups that this rank is not in
        if group.group_desc == label and sorted(members) == sorted(ranks):
            return group
    counts: list[int | None] = [None] * like.size()
    dist.all_gather_object(counts, len(distributed_c10d._world.pg_names), group=like)
    if len(set(counts)) > 1:
        raise MeshError(
            f"ranks {dist.get_process_group_ranks(like)} need a process group for {purpose}, and "
            f"have made different numbers of groups before ({counts}), which torch cannot name "
            "alike. Create process groups and meshes on all ranks alike, before fully_shard."
        )
    made = dist.new_group(
        list(ranks),
        backend=dist.get_backend(like),
        use_local_synchronization=True,
        group_desc=label,
    )
    return cast("dist.ProcessGroup", made)


def preserve_version(tensor: Tensor) -> AbstractContextManager[Any]:
    """Writes to ``tensor`` inside the block do not count as changes to autograd."""
    return cast(
        "AbstractContextManager[Any]", torch.autograd._unsafe_preserve_version_counter(tensor)
    )


def tag_managed_module(module: nn.Module) -> None:
    """Mark ``module`` as ``torch.compile`` expects it: guards skip parameters that get swapped."""
    module._is_fsdp_managed_module = True  # type: ignore[assignment]
    module._fsdp_use_orig_params = True  # type: ignore[assignment]


@functools.cache
def reduces_in_original_dtype() -> bool:
    """Whether the installed torch reduces in the original dtype where no ``reduce_dtype`` is given.

    Up to 2.13 the default is the compute dtype. What came after says in the policy's own
    documentation that it follows ``grad_dtype``; there is nothing else to tell them apart by.
    """
    return "grad_dtype" in (MixedPrecisionPolicy.__doc__ or "")


def has_fsdp_protocol(tensor: Tensor) -> bool:
    """Whether a tensor subclass brings FSDP2's own all-gather protocol."""
    return hasattr(tensor, "fsdp_pre_all_gather") or hasattr(tensor, "fsdp_post_all_gather")


def profiler_span(phase: str, name: str) -> AbstractContextManager[Any]:
    """A labelled range for ``torch.profiler``; nothing at all while no profiler runs."""
    if not torch._C._autograd._profiler_enabled():
        return _NO_SPAN
    return torch.profiler.record_function(f"{phase} {name}")


_NO_SPAN: AbstractContextManager[Any] = nullcontext()
