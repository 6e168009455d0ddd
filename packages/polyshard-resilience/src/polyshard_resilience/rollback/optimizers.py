"""What a step of an optimizer changes, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from polyshard_resilience._torch_private import hooks_after_step
from polyshard_resilience.rollback.copies import Kept, Memory

PARAMS = "params"
PLAIN = (bool, int, float, complex, str, type(None))
SCALES = ("grad_scale", "found_inf")
"""What a ``GradScaler`` hands to a fused optimizer, and takes away when that has stepped."""


@runtime_checkable
class Undoable(Protocol):
    """An optimizer with state outside of ``optimizer.state``.

    After a failed attempt, :func:`attempt` restores parameters, state and settings of the
    optimizers. It restores a plugin's own state through ``polyshard_plugin_state``.
    """

    @property
    def polyshard_steps_early(self) -> bool:
        """Whether parameters change in backward, before ``step()``."""
        ...

    def polyshard_undo(self) -> None:
        """Discard a failed step.

        The caller then restores the values of parameters, and replaces the tensors in
        ``optimizer.state`` by new ones with the old values.
        """
        ...


@runtime_checkable
class Counting(Protocol):
    """A hook of steps that counts them, so that ranks look at the same one."""

    def remember(self) -> Callable[[], None]:
        """Return what makes it count from here again."""
        ...


class OptimizerUndo:
    """One optimizer as it was: its settings when an attempt began, the rest before it stepped.

    State that a parameter has not yet costs nothing, and is gone again afterwards.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Keep groups and settings, which more than steps may change (a scheduler)."""
        self._optimizer = optimizer
        self._settings = Kept(Memory())
        self._groups = [
            (group, list(group[PARAMS]), self._settings.add(_without_params(group)))
            for group in optimizer.param_groups
        ]
        self._settings.take()
        self._plain = {n: v for n, v in vars(optimizer).items() if type(v) in PLAIN}
        self._scales = {n: v for n, v in vars(optimizer).items() if n in SCALES}
        self._counts = [
            h.remember() for h in hooks_after_step(optimizer) if isinstance(h, Counting)
        ]
        self._steps: _Steps | None = None

    def keep(self, memory: StepMemory) -> None:
        """Copy everything that the next step may change, unless that was done before."""
        if self._steps is None:
            self._steps = _Steps(self._optimizer, memory)

    def put_back(self) -> None:
        """Go back. Objects stay: parameters, groups, tensors of state."""
        if self._steps is not None:
            self._steps.undo()
        optimizer, settings = self._optimizer, self._settings
        settings.put_back()
        optimizer.param_groups[:] = [group for group, _, _ in self._groups]
        for group, parameters, values in self._groups:
            group.clear()
            group.update({PARAMS: parameters, **settings.as_it_was(values)})
        for put_back in self._counts:
            put_back()
        for name in SCALES:
            vars(optimizer).pop(name, None)
        vars(optimizer).update(self._plain | self._scales)


@dataclass(frozen=True)
class StepMemory:
    """Where parameters and state of one optimizer are copied to."""

    parameters: Memory = field(default_factory=Memory)
    state: Memory = field(default_factory=Memory)

    @property
    def nbytes(self) -> int:
        """What is kept."""
        return self.parameters.nbytes + self.state.nbytes


class _Steps:
    """What the steps of one optimizer change."""

    def __init__(self, optimizer: Optimizer, memory: StepMemory) -> None:
        self._optimizer = optimizer
        self._parameters, self._kept = Kept(memory.parameters), Kept(memory.state)
        self._parameters.add([p for p in _parameters(optimizer) if _may_change(p)])
        self._state = {p: self._kept.add(value) for p, value in optimizer.state.items()}
        self._parameters.take()
        self._kept.take()

    def undo(self) -> None:
        optimizer, kept = self._optimizer, self._kept
        if isinstance(optimizer, Undoable):
            optimizer.polyshard_undo()
            before = kept.afresh  # it keeps its state elsewhere, and takes over what is put there
        else:
            kept.put_back()
            before = kept.as_it_was
        self._parameters.put_back()
        for parameter in [p for p in optimizer.state if p not in self._state]:
            del optimizer.state[parameter]
        for parameter, value in self._state.items():
            held, found = optimizer.state.get(parameter), before(value)
            if isinstance(held, dict) and isinstance(found, dict):
                held.clear()
                held.update(found)
            else:
                optimizer.state[parameter] = found


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group[PARAMS]]


def _may_change(parameter: Tensor) -> bool:
    return not parameter.is_meta and (parameter.requires_grad or parameter.grad is not None)


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != PARAMS}
