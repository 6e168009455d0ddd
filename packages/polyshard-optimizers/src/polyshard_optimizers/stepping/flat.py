"""The user's optimizer, stepping runs instead of parameters. See [Note: steps] of ``stepper``."""

from __future__ import annotations

from typing import TypeVar

from torch.optim import Optimizer

from polyshard.errors import UnsupportedError
from polyshard_optimizers.stepping.elementwise import check_takeable, reason_against
from polyshard_optimizers.stepping.stepper import SteppedOptimizer, Stepper

O = TypeVar("O", bound=Optimizer)  # noqa: E741


def flat(optimizer: O, *, elementwise: bool = False) -> O:
    """Make ``optimizer`` step contiguous runs of shards instead of parameters, in place.

    Weights and state are bitwise equal, in a fraction of the host time and with temporaries below
    64 MiB. The object, its class, parameter groups, hooks, ``state`` and ``state_dict`` by
    parameter do not change. If a plugin stores optimizer state, call this before or after that
    plugin's own call.

    Args:
        optimizer: an elementwise optimizer over any parameters, sharded or not.
        elementwise: whether an optimizer that is not in the table computes each element only from
            its own weight, gradient and state. Not needed for torch's optimizers.

    Returns:
        The same object.

    Raises:
        SettingError: for an object that is no optimizer.
        UnsupportedError: for an optimizer that is not elementwise, or not known to be.
        LifecycleError: if ``step`` of the object has been replaced.
    """
    stepper = Stepper.of(optimizer)
    if stepper is None:
        check_takeable(optimizer, "flat")
        stepper = Stepper(optimizer)
    if not stepper.by_runs:
        reason = reason_against(optimizer, stepper.kind, is_declared=elementwise)
        if reason is not None:
            raise UnsupportedError(reason)
        stepper.by_runs = True
    if not isinstance(optimizer, SteppedOptimizer):
        stepper.take_over(optimizer)
    return optimizer
