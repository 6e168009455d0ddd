"""The user's optimizer, with its state somewhere else between steps.

[Note: wrapped, not replaced]
The optimizer object stays; its class becomes a subclass whose ``step`` runs the original step on
one chunk of parameters after another (see [Note: twins]). Between steps ``optimizer.state`` holds
windows on what is kept, so state dicts, checkpoints and people see the state as always, without it
being in memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer
from typing_extensions import override

from polyshard_offload._torch_private import is_patched, profiled
from polyshard_offload.errors import OffloadError
from polyshard_offload.optimizer.step import StateOffload
from polyshard_offload.optimizer.step_in_backward import BackwardSteps
from polyshard_offload.resources import Resources


@dataclass(frozen=True, eq=False)
class Wrapping:
    """What steps a wrapped optimizer, and keeps its state."""

    offload: StateOffload
    in_backward: BackwardSteps | None
    """Where parameters are stepped as soon as their gradients are reduced."""

    @property
    def steps(self) -> StateOffload | BackwardSteps:
        """What the user's ``step()`` calls."""
        return self.offload if self.in_backward is None else self.in_backward


class OffloadedOptimizer(Optimizer):
    """Mixed into the class of a wrapped optimizer."""

    _polyshard_offload: Wrapping

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

    def __deepcopy__(self, memo: object) -> NoReturn:
        """A copy would share the files and buffers of the first.

        Raises:
            OffloadError: always.
        """
        raise OffloadError(
            "an optimizer with offloaded state cannot be deep-copied; make a new one, wrap it, and "
            "load the state dict of the first."
        )


def _offloaded_step(self: OffloadedOptimizer, closure: Callable[[], Any] | None = None) -> None:
    """Step all parameters, chunk by chunk.

    Raises:
        OffloadError: for a closure, which would be called once for each chunk.
    """
    if closure is not None:
        raise OffloadError(
            "step(closure) cannot be offloaded: the closure would have to run for every chunk of "
            "parameters. Call it yourself, then step() without it."
        )
    self._polyshard_offload.steps.step()


def check_optimizer(optimizer: object) -> None:
    """Refuse what cannot be wrapped.

    Raises:
        OffloadError: saying why.
    """
    if not isinstance(optimizer, Optimizer):
        raise OffloadError(
            f"Offload.wrap takes a torch.optim.Optimizer, got {type(optimizer).__name__}."
        )
    kind = type(optimizer).__name__
    if isinstance(optimizer, OffloadedOptimizer):
        raise OffloadError(f"this {kind} is wrapped already; wrap an optimizer once.")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OffloadError(
            f"{kind}.step needs a closure, which would have to run for every chunk of parameters; "
            "its state cannot be offloaded."
        )
    if is_patched(optimizer):
        raise OffloadError(
            f"something replaced step() of this {kind} object, as learning rate schedulers do. "
            "Wrap the optimizer first and make the scheduler from the wrapped one."
        )


def wrap(optimizer: Optimizer, resources: Resources) -> Wrapping:
    """Turn ``optimizer`` into one whose state rests in ``resources``, in place.

    Raises:
        StorageError: when there is no room for the state.
    """
    settings = resources.settings
    with resources.reported("(optimizer)"):
        offload = StateOffload(optimizer, resources)
    early = BackwardSteps(offload, settings.chunk_bytes) if settings.step_in_backward else None
    wrapping = Wrapping(offload, early)
    kind = type(optimizer)
    members = {"step": profiled(_offloaded_step), "__module__": kind.__module__}
    optimizer.__class__ = type(f"Offloaded{kind.__name__}", (OffloadedOptimizer, kind), members)
    optimizer.__dict__["_polyshard_offload"] = wrapping
    return wrapping


def wrapping_of(optimizer: Optimizer) -> Wrapping | None:
    """What :func:`wrap` has put into ``optimizer``, if it did."""
    return optimizer._polyshard_offload if isinstance(optimizer, OffloadedOptimizer) else None
