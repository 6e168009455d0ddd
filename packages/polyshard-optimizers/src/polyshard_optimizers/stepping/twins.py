"""Optimizers that step other tensors than the user's, with the arithmetic of the user's class.

[Note: twins]
A *twin* is an object of the optimizer's original class with the same settings, whose groups hold
what is to be stepped now and whose state is theirs. Hooks are the user's optimizer's, and have run
when a twin steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from polyshard._torch.optimizers import plain_step, state_of
from polyshard.errors import UnsupportedError

Group = dict[str, Any]
State = dict[Tensor, dict[str, Any]]


def twin_of(
    optimizer: Optimizer, kind: type[Optimizer], groups: list[Group], state: Any
) -> Optimizer:
    """An optimizer of the user's class that steps ``groups`` with ``state`` and runs no hooks."""
    twin: Optimizer = object.__new__(kind)
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.update(param_groups=groups, state=state)
    return twin


def every_parameter(optimizer: Optimizer) -> list[Tensor]:
    """In the order of the groups."""
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


class Twins:
    """Steps parts of one optimizer, one after the other: together they are one step."""

    def __init__(
        self,
        optimizer: Optimizer,
        kind: type[Optimizer],
        error: type[Exception] = UnsupportedError,
        remedy: str = "Leave the optimizer as it is.",
    ) -> None:
        """``kind`` is the class whose step is made; one that couples parameters is an ``error``."""
        self._error, self._remedy = error, remedy
        self._optimizer = optimizer
        self._kind = kind
        self._step = plain_step(kind)
        self._changed: dict[int, tuple[Group, Group]] = {}
        self._known = 0

    def begin(self) -> None:
        """A step of all parts begins."""
        self._changed = {}
        self._known = len(state_of(self._optimizer))

    def step(self, parts: Iterable[tuple[int, list[Tensor]]], state: Any) -> None:
        """Step tensors, given by the parameter group whose settings hold for them.

        Raises:
            Exception: that of the constructor, for an optimizer that computes settings from some
                parameters at once.
        """
        optimizer = self._optimizer
        used = [(index, {**optimizer.param_groups[index], "params": own}) for index, own in parts]
        if not used:
            return
        twin = twin_of(optimizer, self._kind, [group for _, group in used], state)
        self._step(twin)
        for index, group in used:
            self._note(index, group)
        for name, value in twin.__dict__.items():
            if name not in ("param_groups", "state"):
                optimizer.__dict__[name] = value

    def state_made(self, key: Tensor, group: Mapping[str, Any]) -> dict[str, Any] | None:
        """The state that a first step makes for ``key``, of which nothing else is kept.

        ``key`` is on the meta device; ``None`` where the optimizer cannot step there.
        """
        settings = {**group, "params": [key]}
        # Fused and capturable kernels make the same state, but exist on real devices only.
        settings.update({k: False for k in ("fused", "foreach", "capturable") if k in settings})
        state: dict[Tensor, dict[str, Any]] = {key: {}}
        try:
            self._step(twin_of(self._optimizer, self._kind, [settings], state))
        except Exception:  # whatever it is, the first real step will tell
            return None
        return state[key]

    def _note(self, index: int, stepped: Mapping[str, Any]) -> None:
        """Keep what a step changed in a group's settings (counters, say); parts must agree."""
        before = self._optimizer.param_groups[index]
        for name, value in stepped.items():
            if name == "params" or value is before.get(name):
                continue
            _, noted = self._changed.setdefault(id(before), (before, {}))
            if name in noted and bool(noted[name] != value):
                raise self._error(
                    f"{self._kind.__name__} computed '{name}' of parameter group {index} from some "
                    "parameters at once: it couples parameters, which are stepped in parts here. "
                    f"{self._remedy}"
                )
            noted[name] = value

    def end(self) -> None:
        """All parts are stepped: groups show what that changed in their settings."""
        for group, changed in self._changed.values():
            group.update(changed)
        if len(state_of(self._optimizer)) > self._known:
            self._sort_state()

    def _sort_state(self) -> None:
        """State that came has the order of parameters, on all ranks, wherever they rest."""
        state = state_of(self._optimizer)
        places = {id(p): i for i, p in enumerate(every_parameter(self._optimizer))}
        for key in sorted(list(state)[self._known :], key=lambda key: places.get(id(key), -1)):
            state[key] = state.pop(key)
