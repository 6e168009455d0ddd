"""The user's optimizer, with its state somewhere else between steps.

[Note: wrapped, not replaced]
The optimizer object stays, and is stepped as ``polyshard_optimizers.flat`` has it stepped (see
[Note: lent chunks] of ``step``). Between steps ``optimizer.state`` holds windows on what is kept,
so state dicts, checkpoints and people see the state as always, without it being in memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from polyshard_offload.errors import OffloadError
from polyshard_offload.optimizer.chunks import Slot
from polyshard_offload.optimizer.step import StateOffload
from polyshard_offload.optimizer.step_in_backward import BackwardSteps
from polyshard_offload.resources import Resources
from polyshard_optimizers.stepping import OptimizerKeeper, SteppedOptimizer, Stepper, check_takeable


@dataclass(frozen=True, eq=False)
class Wrapping(OptimizerKeeper):
    """What steps a wrapped optimizer, and keeps its state."""

    error = OffloadError
    remedy = "Use Offload(optimizer='device') with it."

    offload: StateOffload
    in_backward: BackwardSteps | None
    """Where parameters are stepped as soon as their gradients are reduced."""

    @property
    def steps(self) -> StateOffload | BackwardSteps:
        """What the user's ``step()`` calls."""
        return self.offload if self.in_backward is None else self.in_backward

    @override
    def step(self, closure: Callable[[], Any] | None) -> None:
        """Step all parameters, chunk by chunk.

        Raises:
            OffloadError: for a closure, which would be called once for each chunk.
        """
        if closure is not None:
            raise OffloadError(
                "step(closure) cannot be offloaded: the closure would have to run for every chunk "
                "of parameters. Call it yourself, then step() without it."
            )
        self.steps.step()

    @override
    def is_lent(self, parameter: Tensor) -> bool:
        return not self._slot(parameter).in_runs

    @override
    def is_pinned(self, parameter: Tensor) -> bool:
        return self._slot(parameter).record is not None

    def _slot(self, parameter: Tensor) -> Slot:
        return self.offload.state.every_slot[id(parameter)]


class OffloadedOptimizer(SteppedOptimizer):
    """Mixed into the class of a wrapped optimizer."""

    class_prefix = "Offloaded"
    _polyshard_offload: Wrapping

    @property
    def steps_in_backward(self) -> bool:
        """Whether weights change before ``step()`` is called, which guards have to know."""
        return self._polyshard_offload.in_backward is not None

    @override
    def state_dict(self) -> dict[str, Any]:
        """As always; tensors are windows on what is kept, and are read when they are used.

        Raises:
            CorruptedError: with checksums on, when the disk does not hold what was written.
        """
        self._polyshard_offload.offload.verify()
        return super().state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As always; what is loaded goes to the tier, parameter by parameter.

        Raises:
            StorageError: when there is no room for it.
        """
        super().load_state_dict(state_dict)
        with torch.no_grad():
            self._polyshard_offload.steps.adopt_state()

    polyshard_steps_early = steps_in_backward

    def polyshard_undo(self) -> None:
        """Let go of a step that failed: what it changed is about to be written back."""
        wrapping = self._polyshard_offload
        if wrapping.in_backward is not None:
            wrapping.in_backward.abandon()
        wrapping.offload.undo()

    def __deepcopy__(self, memo: object) -> NoReturn:
        """A copy would share the files and buffers of the first.

        Raises:
            OffloadError: always.
        """
        raise OffloadError(
            "an optimizer with offloaded state cannot be deep-copied; make a new one, wrap it, and "
            "load the state dict of the first."
        )


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse what cannot be wrapped.

    Raises:
        OffloadError: saying why.
    """
    check_takeable(optimizer, "Offload.wrap", OffloadError)
    kind = type(optimizer).__name__
    if isinstance(optimizer, OffloadedOptimizer):
        raise OffloadError(f"this {kind} is wrapped already; wrap an optimizer once.")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OffloadError(
            f"{kind}.step needs a closure, which would have to run for every chunk of parameters; "
            "its state cannot be offloaded."
        )


def wrap(optimizer: Optimizer, resources: Resources) -> Wrapping:
    """Turn ``optimizer`` into one whose state rests in ``resources``, in place.

    Raises:
        StorageError: when there is no room for the state.
    """
    settings = resources.settings
    stepper = Stepper.of(optimizer) or Stepper(optimizer)
    with resources.reported("(optimizer)"):
        offload = StateOffload(optimizer, stepper, resources)
    early = BackwardSteps(offload, settings.chunk_bytes) if settings.step_in_backward else None
    wrapping = Wrapping(offload, early)
    stepper.take_over(optimizer, OffloadedOptimizer, wrapping)
    optimizer.__dict__["_polyshard_offload"] = wrapping
    return wrapping


def wrapping_of(optimizer: Optimizer) -> Wrapping | None:
    """What :func:`wrap` has put into ``optimizer``, if it did."""
    return optimizer._polyshard_offload if isinstance(optimizer, OffloadedOptimizer) else None
