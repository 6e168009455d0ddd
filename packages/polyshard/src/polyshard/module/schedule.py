"""Settings of when a sharded module gathers, frees and reduces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from typing_extensions import deprecated, override

from polyshard.engine.root import unit_of, units_below
from polyshard.engine.unit import Unit
from polyshard.errors import LifecycleError, SettingError
from polyshard.group.group import ParameterGroup

# Functions, since methods would hide attributes of the user's class with the same names.


def own_unit(module: TorchFSDPModule) -> Unit:
    """The unit of a sharded module."""
    unit = unit_of(module)  # type: ignore[arg-type]
    assert unit is not None
    return unit


def root_unit(module: TorchFSDPModule, caller: str) -> Unit:
    """The unit, which must not be known to lie below another one."""
    unit = own_unit(module)
    if unit.is_root is False:
        raise LifecycleError(
            f"{caller}() was called on '{unit.name}', which is not the root. Call it on the "
            "outermost sharded module."
        )
    return unit


def own_units(module: TorchFSDPModule, recurse: bool) -> list[Unit]:
    """The unit; with ``recurse`` those below it too."""
    if not recurse:
        return [own_unit(module)]
    return [unit for _, _, unit in units_below(module)]  # type: ignore[arg-type]


def own_groups(module: TorchFSDPModule, recurse: bool) -> list[ParameterGroup]:
    """The groups of these units."""
    return [group for unit in own_units(module, recurse) for group in unit.groups]


def units_of(modules: Sequence[TorchFSDPModule], caller: str) -> tuple[Unit, ...]:
    """The units of ``modules``.

    Raises:
        SettingError: for what is not sharded, naming the ``caller`` that was given it.
    """
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


class ScheduleSettings(TorchFSDPModule):
    """Setters of what happens when."""

    @override
    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last of an iteration and so finishes reductions.

        On a device another backward leaves its last reduction on its way: ``.grad`` lacks that
        until the next backward, a step of an optimizer, a conversion or a load. Clip after the
        last.
        """
        own_unit(self).context.finalization.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether an iteration is ended by :meth:`FSDPModule.finalize_backward`, not by a backward.

        For the root, before a backward starts; :meth:`set_is_last_backward` no longer matters then.
        Until the call, gradients may be unreduced.

        Raises:
            LifecycleError: on a module that is not the root, and when a backward has started.
        """
        unit = root_unit(self, "set_manual_backward_finalization")
        unit.context.finalization.choose(enabled)

    @override
    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward reduces gradients; without, they add up unsharded on each rank.

        Over replicas too: what :meth:`set_requires_all_reduce` said before no longer holds.
        """
        for group in own_groups(self, recurse):
            group.sync(reduces=requires_gradient_sync, all_reduces=requires_gradient_sync)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication inside the block; nests.

        The settings of each unit below are restored on the way out, exceptions included.
        """
        groups = own_groups(self, recurse=True)
        before = [(group.reduces, group.all_reduces) for group in groups]
        self.set_requires_gradient_sync(requires_gradient_sync=False)
        try:
            yield
        finally:
            for group, (reduces, all_reduces) in zip(groups, before, strict=True):
                group.sync(reduces=reduces, all_reduces=all_reduces)

    @override
    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces over replicas; without, partial sums add up sharded."""
        for group in own_groups(self, recurse):
            group.all_reduces = requires_all_reduce

    @override
    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are freed between forward and backward."""
        if not isinstance(reshard_after_forward, bool):
            raise SettingError(
                "set_reshard_after_forward takes True or False, got "
                f"{type(reshard_after_forward).__name__} {reshard_after_forward!r}. An int can be "
                "given to fully_shard only."
            )
        for unit in own_units(self, recurse):
            unit.reshard_after_forward = reshard_after_forward
            for group in unit.groups:
                group.set_block(None)

    @override
    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters are freed after backward (off: one gather less per micro-batch).

        Off, the next micro-batch computes with what was gathered: call :meth:`reshard` after
        parameters were written by hand between micro-batches.
        """
        for group in own_groups(self, recurse):
            group.reshard_after_backward = reshard_after_backward

    @override
    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters without a gradient take part in the reduction with zeros."""
        for group in own_groups(self, recurse):
            settings = group.reduce_settings
            group.reduce_settings = replace(settings, reduce_unused=reduce_scatter_unused_params)

    @override
    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide gradient sums by ``factor`` instead of the number of data-parallel ranks."""
        for group in own_groups(self, recurse=False):
            group.reduce_settings = replace(group.reduce_settings, divide_factor=factor)

    @override
    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward gathers (off for parameters only forward needs, as embeddings)."""
        for group in own_groups(self, recurse=False):
            group.unshard_in_backward = unshard_in_backward

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether the memory of unsharded parameters is kept when they are resharded.

        They have the same addresses in every step then, as captured CUDA graphs need. Kept memory
        holds what was gathered last; it is gathered anew wherever it would be otherwise.
        """
        for group in own_groups(self, recurse):
            group.keep_memory(keep)

    @override
    def set_modules_to_forward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Units to start gathering while this one computes forward, in this order."""
        own_unit(self).forward_prefetch = units_of(modules, "set_modules_to_forward_prefetch")

    @override
    def set_modules_to_backward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Units to start gathering while this one computes backward, in this order."""
        own_unit(self).backward_prefetch = units_of(modules, "set_modules_to_backward_prefetch")

    @override
    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted for compatibility: reductions are plain sums with the division apart anyway."""
        del enable

    @override
    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted for compatibility: gathers never block the host more than needed."""
        del async_op

    @override
    @deprecated("Use `set_gradient_divide_factor` instead")
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Old name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    @override
    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """How many reductions may be in flight at once (default 1); one value for the root."""
        given: object = max_input_buffers  # True is an int, and means something else
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise SettingError(f"max_input_buffers must be an int >= 1, got {given!r}")
        del recurse  # reductions of a root share one queue
        own_unit(self).context.reductions.most = max_input_buffers
