"""What to call an optimizer's parameters when something is to be said of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from polyshard.errors import SettingError, UnsupportedError


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """In the order of its groups, the same on all ranks."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def names_of(optimizer: Optimizer, model: nn.Module | None) -> list[str]:
    """For each of :func:`parameters_of`, its name in the model.

    Without a model, the name that the optimizer was given, or else the place in its groups.
    """
    known = {} if model is None else {id(p): n for n, p in model.named_parameters()}
    names = []
    for index, group in enumerate(optimizer.param_groups):
        given: Any = group.get("param_names", [None] * len(group["params"]))
        for place, (parameter, name) in enumerate(zip(group["params"], given, strict=True)):
            plain = f"parameter {place} of group {index}"
            names.append(known.get(id(parameter)) or name or plain)
    return names


def listed(found: Iterable[str], at_most: int = 4) -> str:
    """The first few, and how many more there are."""
    every = list(found)
    more = [f"and {len(every) - at_most} more"] if len(every) > at_most else []
    return "; ".join([*every[:at_most], *more])


def check_optimizer(optimizer: object, guard: str) -> None:
    """Refuse what is no optimizer.

    Raises:
        SettingError: naming the guard.
    """
    if not isinstance(optimizer, Optimizer):
        raise SettingError(f"{guard} takes a torch.optim.Optimizer, got {type(optimizer).__name__}")


def check_steps_alone(optimizer: Optimizer, guard: str) -> None:
    """Refuse an optimizer that changes weights before its step is called.

    Raises:
        UnsupportedError: saying what to do instead.
    """
    if getattr(optimizer, "steps_in_backward", False):
        raise UnsupportedError(
            f"{guard} cannot guard a {type(optimizer).__name__} that steps in backward: weights "
            "have changed when step() is called. Use step_in_backward=False."
        )
