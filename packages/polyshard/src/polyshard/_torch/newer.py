"""Names that only some of the supported versions of torch have, and what holds where they are not.

Nothing here is read from documentation, which ``python -OO`` strips.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import _collective_utils, _redistribute, debug

from polyshard.errors import UntestedVersionWarning

OLDEST, NEWEST = (2, 11), (2, 15)
"""The first two numbers of the versions; ``docs/reference/versions.md`` says what was run."""


def tested_range() -> str:
    """Both ends, as users write them."""
    return " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))


@cache
def warn_if_untested() -> None:
    """Say once in a process that the installed torch is newer than any that is tested.

    There is no upper bound to what may be installed: most of a new version works, and what does not
    is better met with this line above it.
    """
    if release() > NEWEST:
        warnings.warn(
            f"polyshard is tested with torch {tested_range()}; this is {torch.__version__}. "
            "Compare a few losses with FSDP2's before a long run, or install a tested version.",
            UntestedVersionWarning,
            stacklevel=3,
        )


_name_from = distributed_c10d._hash_ranks_to_str

if TYPE_CHECKING:

    class TorchGradientReductionHandle:
        """Waits for gradients that are being reduced, as in torch 2.15."""

        def wait(self) -> None:
            """Wait for them."""

else:
    try:
        from torch.distributed.fsdp import GradientReductionHandle as TorchGradientReductionHandle
    except ImportError:  # torch before 2.15

        class TorchGradientReductionHandle:
            """Waits for gradients that are being reduced, as in torch 2.15."""


def release() -> tuple[int, ...]:
    """The first two numbers of the installed torch's version."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def reduces_in_original_dtype() -> bool:
    """Whether gradients are reduced in the original dtype where no ``reduce_dtype`` is given.

    Before 2.15 they are reduced in the dtype of compute.
    """
    return release() >= (2, 15)


def rounds_before_adding() -> bool:
    """Whether a gradient is cast to the dtype in which it adds up before it is added.

    Before 2.15 it is added to the sum as it is, and only that is rounded.
    """
    return release() >= (2, 15)


def resets_sharded_gradients() -> bool:
    """Whether ``reset_iter_state()`` drops gradients that were reduced already."""
    return release() >= (2, 15)


def dtype_override_of(policy: object) -> Any:
    """``param_dtype_override_fn`` of a policy (torch 2.15, or a subclass that has it)."""
    return getattr(policy, "param_dtype_override_fn", None)


def grad_dtype_of(parameter: Tensor) -> tuple[bool, torch.dtype | None]:
    """Whether ``parameter`` (a leaf) was told of which dtype gradients are; and of which.

    ``None`` is any. Before 2.15 telling it the dtype it has cannot be told from not telling it.
    """
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", parameter.dtype)
    told: bool | None = getattr(parameter, "_has_grad_dtype_override", None)
    return (dtype is not parameter.dtype if told is None else told), dtype


def set_grad_dtype(parameter: Tensor, dtype: torch.dtype | None) -> None:
    """Have ``parameter`` (a leaf) take gradients of ``dtype``, or of any."""
    cast("Any", parameter).grad_dtype = dtype


def told_by_spmd_types(parameter: Tensor) -> str:
    """What the package ``spmd_types`` was told of a parameter, beyond that ranks hold the same.

    torch 2.15 looks at that where the package is installed. Only a process that imported it can
    have annotated a parameter.
    """
    if "spmd_types" not in sys.modules:  # torch would look for the package each time
        return ""
    is_installed = getattr(dist, "_is_spmd_types_available", None)
    if is_installed is None or not is_installed():
        return ""
    import spmd_types

    told = dict(spmd_types.get_local_type(parameter))
    spec = spmd_types.get_partition_spec(parameter)
    kinds = [f"{kind} on {axis}" for axis, kind in told.items() if kind is not spmd_types.R]
    return ", ".join([*kinds, *([] if spec is None else [str(spec)])])


def coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the backend of ``group`` for ``device`` launches several collectives as one.

    Asked of the backend: by name there are several that do, and a group may have one per device. A
    group that is written in Python has none, and says it itself.
    """
    try:
        backend = cast("Any", group)._get_backend(device)
    except RuntimeError:
        backend = group
    return bool(getattr(backend, "supports_coalescing", False))


def any_tensor_properties() -> type[Any]:
    """What the metadata of a checkpoint says of a tensor, also as a newer torch wrote it.

    2.15 pickles six facts, and older versions refuse what is not five; the sixth is how elements
    lay in memory, of which loading makes no use.
    """
    from torch.distributed.checkpoint.metadata import TensorProperties

    facts = len(TensorProperties().__getstate__())

    class AnyTensorProperties(TensorProperties):
        def __setstate__(self, state: tuple[Any, ...]) -> None:
            super().__setstate__(state[:facts])  # type: ignore[no-untyped-call]
            self.__class__ = TensorProperties  # type: ignore[assignment]

    return AnyTensorProperties


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the backend of ``group`` for ``device``; empty where it has none for it."""
    config = dist.get_backend_config(group)
    if ":" not in config:
        return config.lower()
    pairs = dict(part.split(":", 1) for part in config.split(","))
    return pairs.get(device.type, "").lower()


def name_of_next_group() -> str:
    """From what torch would make the name of a group made now, beside its ranks.

    Up to some version that is the number of groups that a rank is in, later the number it has made.
    """
    return distributed_c10d._hash_ranks_to_str([])


def name_groups_apart(mark: int) -> None:
    """Have the names of process groups made from now on differ from those of destroyed groups.

    Up to some version torch names a group after its ranks and the number of groups there are. A
    name that comes again finds in the store what the first group left there. Every rank gives the
    same ``mark``, another one each time.
    """

    def marked(ranks: list[int]) -> str:
        return _name_from([*ranks, -mark])

    setattr(distributed_c10d, "_hash_ranks_to_str", marked)  # noqa: B010


def forget_shardings() -> None:
    """Drop what torch remembers of operations on a ``DTensor``, and the meshes it remembers.

    See [Note: equal meshes] in ``clipping.py``. Each thread remembers for itself, and backwards on
    an accelerator run in a thread of torch's.
    """
    _forget_in_this_thread()
    device = torch.accelerator.current_accelerator(check_available=True)
    # A device that was never used has no such thread, and should not be begun for this.
    if device is not None and torch.get_device_module(device).is_initialized():
        with torch.enable_grad():
            probe = torch.zeros((), device=device).requires_grad_().clone()
        probe.register_hook(lambda _: _forget_in_this_thread())
        probe.backward()


def _forget_in_this_thread() -> None:
    steps = getattr(_redistribute, "_gen_transform_infos", None)
    costs = getattr(_collective_utils, "MeshTopoInfo", None)
    for clear in (
        getattr(debug, "_clear_sharding_prop_cache", None),
        getattr(_redistribute, "clear_redistribute_planner_cache", None),
        getattr(steps, "cache_clear", None),
        getattr(getattr(costs, "build_from_mesh", None), "cache_clear", None),
    ):
        if clear is not None:  # not with every torch
            clear()


def forget_destroyed_groups() -> None:
    """Forget shardings once for each default process group.

    torch finds what it remembers by meshes, and a mesh made after ``destroy_process_group`` equals
    the one before: operations would look for process groups that are gone.
    """
    world = dist.group.WORLD
    if world is not None and world not in _worlds():
        forget_shardings()
        _worlds().add(world)


@cache
def _worlds() -> weakref.WeakSet[dist.ProcessGroup]:
    return weakref.WeakSet()
