"""What asynchronous calls on a sharded module return, to be waited for."""

from __future__ import annotations

from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle
from typing_extensions import override

from polyshard._torch.newer import TorchGradientReductionHandle
from polyshard.engine.finalization import Reduction
from polyshard.engine.unit import RootContext, Unit


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
