"""The methods a sharded module gains."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, overload

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle
from typing_extensions import override

from polyshard._torch.engine_state import shown_to_torch
from polyshard._torch.newer import TorchGradientReductionHandle
from polyshard.engine.opaque import calling, enroll
from polyshard.engine.plans import compare_early
from polyshard.engine.step import Reduction
from polyshard.engine.unit import RootContext, Unit, finalize, start_to_finalize
from polyshard.errors import DeepcopyError, LifecycleError
from polyshard.module.communication import CommunicationSettings
from polyshard.module.schedule import (
    ScheduleSettings,
    own_groups,
    own_unit,
    root_unit,
    units_of,
)


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


class GradientReductionHandle(TorchGradientReductionHandle):
    """Waits for an asynchronous :meth:`FSDPModule.finalize_backward`."""

    def __init__(
        self, context: RootContext | None = None, reduction: Reduction | None = None
    ) -> None:
        """For ``reduction`` of the root with ``context``; without, there is nothing to wait for."""
        self._context = context
        self._reduction = reduction

    @override
    def wait(self) -> None:
        """Have the sharded gradients in place when this returns. May be called again.

        Raises:
            LifecycleError: when ``reset_iter_state()`` dropped what it waits for.
        """
        if self._context is not None and self._reduction is not None:
            self._context.wait_for_reduction(self._reduction)
            self._context = self._reduction = None


class FSDPModule(ScheduleSettings, CommunicationSettings):
    """Mixed into the class of every module ``fully_shard`` was applied to.

    A subclass of torch's class of the same name, so that ``isinstance`` checks made against torch
    hold; every method acts on polyshard's engine.
    """

    # Parameters -------------------------------------------------------------------------------

    @override
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own parameters (not those of units below).

        Args:
            async_op: return a handle at once; without a ``wait()`` on it, forward waits.
        """
        unit = own_unit(self)
        if unit.is_root is None and unit.is_sharded():
            compare_early(unit)  # no forward has compared plans yet
        unit.unshard()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    @override
    def reshard(self) -> None:
        """Free this module's own unsharded parameters and register the sharded ones."""
        own_unit(self).reshard()

    @override
    def reset_iter_state(self) -> None:
        """Make the next iteration valid after an exception in forward or backward.

        Gradients of the failed iteration, accumulated ones included, are lost; with torch 2.15 and
        later those that were reduced already as well, as torch's own does it. A handle of
        :meth:`finalize_backward` that was not waited for is no longer valid.

        All ranks call it: process groups of gloo that polyshard-resilience had to cut, to wake a
        rank in a collective of the model's own, are connected anew.

        Raises:
            LifecycleError: on a module that is not the root.
            PeerError: when another rank fails while process groups are connected.
        """
        context = root_unit(self, "reset_iter_state").context
        context.reset()
        context.failures.renew()

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = ...) -> None: ...

    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...

    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End the iteration after all of its backwards: reduce what they left, free parameters.

        For roots with :meth:`set_manual_backward_finalization`. Where several backwards come first,
        have them accumulate with ``set_requires_gradient_sync(False)`` and turn it on again before.
        Before the first forward there is nothing to end, and nothing happens.

        Args:
            async_op: return while the last reductions are on their way. Wait for the handle before
                gradients are read, and before the next forward of this root or of one that shares
                its communication.

        Raises:
            LifecycleError: at a moment when it cannot work, saying what to do first.
        """
        unit = own_unit(self)
        if unit.is_root is None:
            return GradientReductionHandle() if async_op else None
        if not async_op:
            finalize(unit)
            return None
        return GradientReductionHandle(unit.context, start_to_finalize(unit))

    # nn.Module --------------------------------------------------------------------------------

    @override
    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Convert or move sharded parameters; their memory is put together again at once."""
        unit = own_unit(self)
        unit.context.reductions.finish()  # into gradients of the form that parameters have now
        unit.reshard()
        members = [p for group in unit.groups for p in group.shards.parameters]
        lifted = [(p, gradient) for p in members if (gradient := p.lift_gradient()) is not None]
        applied = super(TorchFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        for group in unit.groups:
            group.adopt_replaced()
        with torch.no_grad():
            for parameter, gradient in lifted:
                parameter.put_gradient(gradient)
        return applied

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Of sharded parameters too, where a forward has left unsharded ones registered."""
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
        (to_none,) = args[:1] or (kwargs.get("set_to_none", True),)
        modules = set(self.modules())  # type: ignore[attr-defined]
        for group in own_groups(self, recurse=True):
            group.shards.zero_gradients(modules, to_none=to_none)

    @override
    def _get_fsdp_state(self) -> Any:
        """The little that torch's own functions take from the state of its engine."""
        return shown_to_torch(self)  # type: ignore[arg-type]


FSDPModule._orig_cls_mro_index = len(FSDPModule.__mro__)  # before ``object`` there is the original


def refuse_deepcopy(*args: object, **kwargs: object) -> NoReturn:
    """Replaces ``__deepcopy__`` of sharded classes."""
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
    roots = units_of(modules, "share_comm_ctx")
    for unit in roots:
        if unit.is_root is not None:
            raise LifecycleError(
                f"share_comm_ctx was given '{unit.name}' after its first forward; call it right "
                "after sharding."
            )
    for unit in roots[1:]:
        unit.context.pool = roots[0].context.pool
        unit.context.lanes = roots[0].context.lanes
        unit.context.finalization.join(roots[0].context.finalization.line)
