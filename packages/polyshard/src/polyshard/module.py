"""The methods a sharded module gains."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle
from typing_extensions import override

from polyshard.engine.opaque import calling, enroll
from polyshard.engine.plans import compare_early
from polyshard.engine.root import unit_of, units_below
from polyshard.engine.unit import Unit
from polyshard.errors import DeepcopyError, LifecycleError, SettingError, UnsupportedError, warn
from polyshard.group.group import ParameterGroup
from polyshard.transport.custom import AllGather, ReduceScatter


class UnshardHandle(TorchUnshardHandle):
    """Waits for an asynchronous :meth:`FSDPModule.unshard`."""

    def __init__(self, unit: Unit) -> None:
        """For ``unit``, whose gather has started."""
        self._unit: Unit | None = unit

    @override
    def wait(self) -> None:
        """Have the unsharded parameters registered when this returns. May be called again."""
        if self._unit is not None:
            self._unit.wait()
            self._unit = None


class FSDPModule(TorchFSDPModule):
    """Mixed into the class of every module ``fully_shard`` was applied to.

    A subclass of torch's class of the same name, so that ``isinstance`` checks made against torch
    hold; every method acts on polyshard's engine.
    """

    _orig_cls_mro_index: int = 3

    def _unit(self) -> Unit:
        unit = unit_of(self)  # type: ignore[arg-type]
        assert unit is not None
        return unit

    def _units(self, recurse: bool) -> list[Unit]:
        if not recurse:
            return [self._unit()]
        return [unit for _, _, unit in units_below(self)]  # type: ignore[arg-type]

    def _groups(self, recurse: bool) -> list[ParameterGroup]:
        return [group for unit in self._units(recurse) for group in unit.groups]

    # Parameters -------------------------------------------------------------------------------

    @override
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own parameters (not those of units below).

        Args:
            async_op: return a handle at once; forward waits by itself if nobody did before.
        """
        unit = self._unit()
        if unit.is_root is None and unit.is_sharded():
            compare_early(unit)  # nobody has compared plans yet
        unit.unshard()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    @override
    def reshard(self) -> None:
        """Free this module's own unsharded parameters and register the sharded ones."""
        self._unit().reshard()

    @override
    def reset_iter_state(self) -> None:
        """Make the next iteration valid after an exception in forward or backward.

        Gradients of the failed iteration, accumulated ones included, are lost.

        Raises:
            LifecycleError: on a module that is not the root.
        """
        unit = self._unit()
        if unit.is_root is False:
            raise LifecycleError(
                f"reset_iter_state() was called on '{unit.name}', which is not the root. Call it "
                "on the outermost sharded module."
            )
        unit.context.reset()

    # Settings ---------------------------------------------------------------------------------

    @override
    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last of an iteration and so finishes reductions."""
        self._unit().context.is_last_backward = is_last_backward

    @override
    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward reduces gradients; without, they add up unsharded on each rank.

        Over replicas too: what :meth:`set_requires_all_reduce` said before no longer holds.
        """
        for group in self._groups(recurse):
            group.reduces = requires_gradient_sync
            group.reduce_settings.all_reduce = requires_gradient_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication inside the block; nests.

        The settings of each unit below are restored on the way out, exceptions included.
        """
        groups = self._groups(recurse=True)
        before = [(group.reduces, group.reduce_settings.all_reduce) for group in groups]
        self.set_requires_gradient_sync(requires_gradient_sync=False)
        try:
            yield
        finally:
            for group, (reduces, all_reduces) in zip(groups, before, strict=True):
                group.reduces = reduces
                group.reduce_settings.all_reduce = all_reduces

    @override
    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces over replicas; without, partial sums add up sharded."""
        for group in self._groups(recurse):
            group.reduce_settings.all_reduce = requires_all_reduce

    @override
    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are freed between forward and backward."""
        if not isinstance(reshard_after_forward, bool):
            raise SettingError(
                "set_reshard_after_forward takes True or False, got "
                f"{type(reshard_after_forward).__name__} {reshard_after_forward!r}. An int can be "
                "given to fully_shard only."
            )
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward
            for group in unit.groups:
                group.end_block()

    @override
    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters are freed after backward (off: one gather less per micro-batch)."""
        for group in self._groups(recurse):
            group.reshard_after_backward = reshard_after_backward

    @override
    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters without a gradient take part in the reduction with zeros."""
        for group in self._groups(recurse):
            group.reduce_settings.reduce_unused = reduce_scatter_unused_params

    @override
    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide gradient sums by ``factor`` instead of the number of data-parallel ranks."""
        for group in self._groups(recurse=False):
            group.reduce_settings.divide_factor = factor

    @override
    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward gathers (off for parameters only forward needs, as embeddings)."""
        for group in self._groups(recurse=False):
            group.unshard_in_backward = unshard_in_backward

    @override
    def set_modules_to_forward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Units to start gathering while this one computes forward, in this order."""
        self._unit().forward_prefetch = _units_of(modules, "set_modules_to_forward_prefetch")

    @override
    def set_modules_to_backward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Units to start gathering while this one computes backward, in this order."""
        self._unit().backward_prefetch = _units_of(modules, "set_modules_to_backward_prefetch")

    @override
    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted for compatibility: reductions are plain sums with the division apart anyway."""
        del enable

    @override
    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted for compatibility: gathers never block the host more than needed."""
        del async_op

    @override
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Old name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    @override
    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """How many reductions may be in flight at once (default 1); one value for the root."""
        if max_input_buffers < 1:
            raise SettingError(f"max_input_buffers must be an int >= 1, got {max_input_buffers!r}")
        del recurse  # reductions of a root share one queue
        self._unit().context.max_reductions = max_input_buffers

    # Communication ----------------------------------------------------------------------------

    @override
    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Have ``hook`` change this unit's reduced gradients before they are stored.

        It gets each group's averaged shard (flat, reduce dtype), after any all-reduce, in the order
        of the reductions. Several groups of a unit each call it (torch refuses those).

        Args:
            hook: changes its argument in place.
            stream: runs the hook there; the current stream waits for it.
        """
        for group in self._groups(recurse=False):
            group.reduce_settings.hook = hook if stream is None else _on_stream(hook, stream)

    @override
    def set_post_optim_event(self, event: torch.Event) -> None:
        """Have the next forward of the root wait for ``event`` before anything is gathered.

        The compute stream waits, which is always right; gathers then wait for the compute stream.
        Without streams (CPU) there is nothing to wait for.

        Raises:
            LifecycleError: on a module that is not the root.
        """
        unit = self._unit()
        if unit.is_root is False:
            raise LifecycleError(
                f"set_post_optim_event() was called on '{unit.name}', which is not the root."
            )
        unit.context.post_optim_event = event

    @override
    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Have ``comm`` gather this unit's parameters, through one flat buffer it allocates."""
        for group in self._groups(recurse=False):
            group.set_comms(replace(group.comms, all_gather=comm))

    @override
    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Have ``comm`` reduce this unit's gradients, through one flat buffer it allocates."""
        for group in self._groups(recurse=False):
            group.set_comms(replace(group.comms, reduce_scatter=comm))

    @override
    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Whether reductions get a communicator of their own.

        Only collectives queue behind each other; on gloo messages do not, and nothing changes.
        """
        for group in self._groups(recurse):
            group.separate_reductions(enable)

    @override
    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """No effect, and a warning: transfers use parameters and gradients where they rest."""
        if enable:
            warn([_without_buffers("set_allocate_memory_from_process_group_for_comm")])

    @override
    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """No effect, and a warning: transfers use parameters and gradients where they rest."""
        del backend
        warn([_without_buffers("set_symm_mem_for_comm")])

    # nn.Module --------------------------------------------------------------------------------

    @override
    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Convert or move sharded parameters; their memory is put together again at once."""
        unit = self._unit()
        unit.reshard()
        applied = super(TorchFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        for group in unit.groups:
            group.adopt_replaced()
        return applied

    @override
    def _get_fsdp_state(self) -> NoReturn:
        """Torch's private way to its own engine; there is none behind this module."""
        raise UnsupportedError(
            "this module is sharded by polyshard, not by torch.distributed.fsdp: it has no "
            "FSDPState. Use the public methods of FSDPModule."
        )


def _on_stream(
    hook: Callable[[torch.Tensor], None], stream: torch.cuda.Stream
) -> Callable[[torch.Tensor], None]:
    def run(gradient: torch.Tensor) -> None:
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            hook(gradient)
        current.wait_stream(stream)

    return run


def _units_of(modules: Sequence[TorchFSDPModule], caller: str) -> tuple[Unit, ...]:
    units = []
    for module in modules:
        unit = unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None:
            raise SettingError(
                f"{caller} takes modules that fully_shard was applied to, got "
                f"{type(module).__name__}."
            )
        units.append(unit)
    return tuple(units)


def refuse_deepcopy(*args: object, **kwargs: object) -> NoReturn:
    """Stands in for ``__deepcopy__`` of sharded classes."""
    del args, kwargs
    raise DeepcopyError(
        "a sharded module cannot be deep-copied: its parameters rest in shared buffers. Build "
        "the copy anew, shard it, and load the state dict of the first."
    )


@functools.cache
def _sharded_class(original: type[Any]) -> type[Any]:
    """One for each class: what is compiled for one module serves others of its class."""
    own = {"__deepcopy__": refuse_deepcopy, "__call__": calling(original)}
    return type(f"FSDP{original.__name__}", (FSDPModule, original), own)


def mix_in(module: nn.Module, unit: Unit) -> None:
    """Turn ``module`` into an :class:`FSDPModule` of its own class, in place."""
    original: Any = type(module)
    module.__class__ = _sharded_class(original)
    module.__dict__["_polyshard_unit"] = unit
    enroll(module)


def share_comm_ctx(modules: Sequence[TorchFSDPModule]) -> None:
    """Let several roots share what transfers need, so that each does not keep memory of its own.

    Call it after sharding and before the first forward of any of them.

    Raises:
        SettingError: for a module that is not sharded.
        LifecycleError: when one of them already ran.
    """
    roots = _units_of(modules, "share_comm_ctx")
    for unit in roots:
        if unit.is_root is not None:
            raise LifecycleError(
                f"share_comm_ctx was given '{unit.name}' after its first forward; call it right "
                "after sharding."
            )
    for unit in roots[1:]:
        unit.context.pool = roots[0].context.pool


def _without_buffers(setter: str) -> str:
    return (
        f"{setter}() has no effect: polyshard sends parameters and gradients from where they rest "
        "and has no communication buffers to allocate elsewhere"
    )
