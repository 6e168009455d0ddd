"""Every private torch name polyshard uses, so that a new torch is checked in one file.

Each name is exercised by ``tests/torch/test_torch_private.py`` on every torch version supported.

[Note: untraced]
A hook waits for transfers and changes registered parameters. A module with hooks is not compiled
as a whole: dynamo runs ``__call__`` as it is and compiles each function that it calls, the module's
own forward among them, which is what one wants to compile. Hooks are functions it calls too. So the
frame of the wrapper is marked to be skipped, before dynamo ever sees it: then a compiled module
has no graph break at its own hooks, and ``fullgraph=True`` holds for it. Where dynamo inlines the
call of a module into another graph it asks for no frame, and breaks the graph at the hook.

Importing dynamo takes seconds, so the engine asks it only where other code has imported it.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes

from polyshard._torch.newer import any_tensor_properties, name_of_next_group
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
    "StorageGate",
    "become",
    "chunk_cat",
    "coalescing",
    "default_store",
    "dtensor_spec",
    "gates_work",
    "has_fsdp_protocol",
    "have_moved",
    "in_backward",
    "is_strided",
    "join_meshes",
    "local_tensor",
    "metadata_classes",
    "outside_transforms",
    "preserve_version",
    "profiler_runs",
    "profiler_span",
    "queue_backward_callback",
    "reaches_host",
    "root_mesh",
    "shared_group",
    "skip_frames_of",
    "storage_holders",
    "storages_are_held",
    "store_timeout_seconds",
    "strided_shard",
    "tag_managed_module",
    "transforms_run",
    "untraced",
    "wrap_local",
    "wrap_parameter",
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
    # Without __init__, which does nothing, and takes twice as long to have dynamo ignore it.
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def wrap_parameter(local: Tensor, spec: DTensorSpec, *, requires_grad: bool) -> nn.Parameter:
    """As ``nn.Parameter`` of a DTensor, which goes through its dispatch to detach it."""
    value: Any = wrap_local(local.detach(), spec)
    value._is_param = True
    return cast("nn.Parameter", value.requires_grad_(requires_grad))


def chunk_cat(tensors: list[Tensor], out: Tensor) -> None:
    """Row r of ``out`` (``[chunks, n]``) becomes the r-th chunk along dim 0 of each, end to end."""
    torch._chunk_cat(tensors, dim=0, num_chunks=out.shape[0], out=out)


def local_tensor(value: DTensor) -> Tensor:
    """The local tensor itself; ``to_local()`` would return an autograd view of it."""
    return value._local_tensor


def become(kept: nn.Parameter, made: nn.Parameter) -> None:
    """Have a DTensor be what ``made`` is: its mesh, placements and local memory; its object stays.

    Of another device it becomes another tensor, which torch refuses where a weak reference to
    either exists.
    """
    if kept.device == made.device:
        ours, other = cast("Any", kept), cast("Any", made)
        ours._local_tensor, ours._spec = other._local_tensor, other._spec
    else:
        gradient = kept.grad
        made.__dict__.update(kept.__dict__)
        torch.utils.swap_tensors(kept, made)
        if gradient is not None:
            kept.grad = gradient.to(kept.device)


def storage_holders(tensor: Tensor) -> int:
    """How many tensors (and other owners) hold the memory of ``tensor``, itself included."""
    storage = tensor.untyped_storage()
    counted: int = torch._C._storage_Use_Count(storage._cdata)
    return counted - 1  # without ``storage``


class StorageGate:
    """Closes a storage: torch raises whenever it is asked for the memory, and says it has 0 bytes.

    The flags are those torch itself sets on storages without data (``FakeTensor``'s, say) and
    offers no way to take back. They and the size are two neighbouring words of the object. Where
    they are not found (see :func:`gates_work`) a gate does nothing.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self._words: ctypes.Array[ctypes.c_uint64] | None = None
        found = _gate_words()
        if found is not None:
            self._words = (ctypes.c_uint64 * 2).from_address(storage._cdata + found.offset)
            self._nbytes, self._flags = self._words
            self._closed_flags = self._flags | found.flags

    def close(self) -> None:
        """From now on reading and writing raise ``RuntimeError``; open before closing again."""
        if self._words is not None:
            self._nbytes = self._words[0]
            self._words[0], self._words[1] = 0, self._closed_flags

    def open(self) -> None:
        """As it was when it was closed."""
        if self._words is not None:
            self._words[0], self._words[1] = self._nbytes, self._flags


def gates_work() -> bool:
    """Whether this torch's storages can be closed; probed once per process."""
    return _gate_words() is not None


@dataclass(frozen=True)
class _GateWords:
    """Where a storage keeps its size (the next word has the flags), and which flags close it."""

    offset: int
    flags: int


_STORAGE_WORDS = 10
"""How much of a storage is searched, in words: less than its size in every torch supported."""


@functools.cache
def _gate_words() -> _GateWords | None:
    """Found by what happens to a throwaway storage, whichever mode of torch is on just now."""
    with _disable_current_modes():
        return _found_gate_words()


def _found_gate_words() -> _GateWords | None:
    memory = (ctypes.c_float * 1021)()
    tensor = torch.frombuffer(memory, dtype=torch.float32)
    storage = tensor.untyped_storage()
    words = (ctypes.c_uint64 * _STORAGE_WORDS).from_address(storage._cdata)
    sizes = [i for i, word in enumerate(words) if word == storage.nbytes()]
    if sys.byteorder != "little" or len(sizes) != 1 or sizes[0] + 1 == _STORAGE_WORDS:
        return None
    size = sizes[0]
    nbytes, before = words[size], words[size + 1]
    try:
        for flags in _flag_pairs(before):
            words[size + 1] = before | flags
            if not (_is_refused(tensor.sum) and _is_refused(tensor.zero_)):
                continue
            words[size] = 0
            if storage.nbytes() == 0 and _is_refused(storage.data_ptr):
                return _GateWords(8 * size, flags)
            words[size] = nbytes
    finally:
        words[size], words[size + 1] = nbytes, before
    return None


def _flag_pairs(before: int) -> list[int]:
    """Every two of the flags (a byte each) that are not set yet."""
    unset = [1 << 8 * byte for byte in range(8) if not before >> 8 * byte & 0xFF]
    return [first | second for first, second in itertools.combinations(unset, 2)]


def _is_refused(access: Callable[[], object]) -> bool:
    try:
        access()
    except RuntimeError as error:
        return "data pointer" in str(error)
    return False


def storages_are_held(storages: Iterable[torch.UntypedStorage]) -> bool:
    """Whether other tensors hold one of them than one each, which the caller knows of."""
    count = torch._C._storage_Use_Count
    for storage in storages:  # noqa: SIM110  (a generator would be called for each of them)
        if count(storage._cdata) > 2:
            return True
    return False


Watched = tuple[Mapping[str, object], str, nn.Parameter, Tensor, int]
"""What a module's dictionary is to hold under a name, its local tensor, and that one's address."""


def have_moved(watched: Iterable[Watched]) -> bool:
    """Whether anything is not as it was; one loop, because it runs in every forward."""
    for held, name, parameter, local, address in watched:
        if held.get(name) is not parameter:
            return True
        if parameter._local_tensor is not local or local.data_ptr() != address:  # type: ignore[attr-defined]
            return True
    return False


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward now running has ended."""
    Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether this thread runs inside an autograd backward (activation checkpointing does)."""
    return torch._C._current_graph_task_id() != -1


def next_node() -> int:
    """The number of the next node that autograd makes in this thread."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def is_made_since(number: int, tensor: Tensor) -> bool:
    """Whether autograd has computed ``tensor``, by a node with this ``number`` or a later one."""
    node = tensor.grad_fn
    return node is not None and node._sequence_nr() >= number


def calls_under_way(module: nn.Module, method: Callable[..., Any]) -> int:
    """How many calls of ``module``, and of ``method`` with it, are in the stack of this thread."""
    names = {nn.Module._call_impl.__code__: "self", method.__code__: "module"}
    count = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = names.get(frame.f_code)
        count += name is not None and frame.f_locals[name] is module
        frame = frame.f_back
    return count


def reaches_host(group: dist.ProcessGroup) -> bool:
    """Whether collectives of ``group`` take tensors on the CPU."""
    return any(device.type == "cpu" for device in group._device_types)


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


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long transfers of ``group`` wait on the CPU; on its device, where it has no other."""
    for device in sorted(group._device_types, key=lambda device: device.type != "cpu"):
        with suppress(RuntimeError):  # a backend that has no options
            options = getattr(group._get_backend(device), "options", None)
            found = getattr(options, "_timeout", None)
            if isinstance(found, timedelta):
                return found
    return distributed_c10d._get_default_timeout(dist.Backend("gloo"))


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
    names: list[str | None] = [None] * like.size()
    dist.all_gather_object(names, name_of_next_group(), group=like)
    if len(set(names)) > 1:
        wanting = dist.get_process_group_ranks(like)
        kinds = [[r for r, n in zip(wanting, names, strict=True) if n == k] for k in {*names}]
        raise MeshError(
            f"ranks {wanting} need a process group for {purpose}, and have made different numbers "
            f"of groups before (ranks {' and ranks '.join(map(str, sorted(kinds)))} differ), which "
            "torch cannot name alike. Create process groups and meshes on all ranks alike, before "
            "fully_shard."
        )
    made = dist.new_group(
        list(ranks),
        backend=dist.get_backend(like),
        use_local_synchronization=True,
        timeout=timeout_of(like),
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
def metadata_classes() -> Mapping[tuple[str, str], Any]:
    """What the pickled metadata of a distributed checkpoint may name, by module and name.

    Beside these there are dtypes, and the path it was written to.
    """
    from torch.distributed.checkpoint import filesystem, metadata
    from torch.serialization import _get_layout

    classes = (
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
    )
    found: dict[tuple[str, str], Any] = {(c.__module__, c.__name__): c for c in classes}
    return {
        **found,
        (metadata.TensorProperties.__module__, "TensorProperties"): any_tensor_properties(),
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): _get_layout,
    }


P = ParamSpec("P")
R = TypeVar("R")


def transforms_run() -> bool:
    """Whether the caller runs inside a transform of ``torch.func``."""
    return torch._C._are_functorch_transforms_active()


def outside_transforms(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which handles plain tensors even where a transform runs."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch._C._are_functorch_transforms_active():
            return function(*args, **kwargs)
        with torch._C._DisableFuncTorch():
            return function(*args, **kwargs)

    return call


F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """``function``, never traced, nor anything it calls. See [Note: untraced]."""
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    skip_frames_of(call)
    return cast("F", call)


def skip_frames_of(function: Callable[..., Any]) -> None:
    """Have dynamo run ``function`` as it is, whichever compiled function it is called from."""
    action = eval_frame._FrameAction
    # Dynamo still compiles what the function calls: the wrapper itself asks it not to.
    strategy = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


def has_fsdp_protocol(tensor: Tensor) -> bool:
    """Whether a tensor subclass brings FSDP2's own all-gather protocol."""
    names = ("pre_all_gather", "post_all_gather")
    more = "should_release_all_gather_outputs_after_post_all_gather"
    return any(hasattr(tensor, f"fsdp_{name}") for name in (*names, more))


profiler_runs: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether ``torch.profiler`` records; no Python function, since every part of a step asks."""


def profiler_span(phase: str, name: str) -> AbstractContextManager[Any]:
    """A labelled range for ``torch.profiler``; nothing at all while no profiler runs."""
    if not profiler_runs():
        return NO_SPAN
    return torch.profiler.record_function(f"{phase} {name}")


NO_SPAN: AbstractContextManager[Any] = nullcontext()
