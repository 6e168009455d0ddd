"""Optimizers that step other tensors than the user's, with the arithmetic of the user's class.

[Note: twins]
A *twin* is an object of the optimizer's original class with the same settings, whose groups hold
what is to be stepped now and whose state is theirs. Hooks are the user's optimizer's, and have run
when a twin steps.

Every twin of a step begins with the settings and attributes that the optimizer had when the step
began, so that a counter counts it once. What twins make of them is the optimizer's when the step
ends. Unknown classes may have lists beside their groups: their twins have every group in
its place, with no parameters where nothing is stepped. torch's own have no such lists, and are
spared the time that groups take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from polyshard._torch.optimizers import plain_step, state_of
from polyshard.errors import UnsupportedError
from polyshard_optimizers.stepping.elementwise import is_known

Group = dict[str, Any]
State = dict[Tensor, dict[str, Any]]


def twin_of(
    attributes: Mapping[str, Any], kind: type[Optimizer], groups: list[Group], state: Any
) -> Optimizer:
    """An optimizer of the user's class that steps ``groups`` with ``state`` and runs no hooks."""
    twin: Optimizer = object.__new__(kind)
    twin.__dict__.update(attributes)
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
        self._needs_every_group = not is_known(kind)
        self._before: dict[str, Any] = {}
        self._attributes: dict[str, Any] = {}
        self._changed: dict[int, tuple[Group, Group]] = {}
        self._idle: dict[int, tuple[Group, Group]] = {}
        self._stepped: set[int] = set()
        self._known = 0

    def begin(self) -> None:
        """A step of all parts begins."""
        attributes = self._optimizer.__dict__.items()
        self._before = {n: v for n, v in attributes if n not in ("param_groups", "state")}
        self._attributes, self._changed, self._idle = {}, {}, {}
        self._stepped = set()
        self._known = len(state_of(self._optimizer))

    def step(self, parts: Iterable[tuple[int, list[Tensor]]], state: Any) -> None:
        """Step tensors, given by the parameter group whose settings hold for them.

        Raises:
            Exception: that of the constructor, for an optimizer that computes settings from some
                parameters at once.
        """
        groups = self._optimizer.param_groups
        used = [(index, {**groups[index], "params": own}) for index, own in parts]
        if not used:
            return
        stepped = {index for index, _ in used}
        self._stepped |= stepped
        if self._needs_every_group:
            every = range(len(groups))
            used += [(i, {**groups[i], "params": []}) for i in every if i not in stepped]
            used.sort(key=itemgetter(0))
        twin = twin_of(self._before, self._kind, [group for _, group in used], state)
        self._step(twin)
        for index, group in used:
            if index in stepped:
                self._note(index, group)
            else:
                self._idle[index] = groups[index], dict(_changes(groups[index], group))
        self._note_attributes(twin)

    def state_made(self, key: Tensor, group: Mapping[str, Any]) -> dict[str, Any] | None:
        """The state that a first step makes for ``key``, of which nothing else is kept.

        ``key`` is on the meta device; ``None`` where the optimizer cannot step there.
        """
        settings = {**group, "params": [key]}
        # Fused and capturable kernels make the same state, but exist on real devices only.
        settings.update({k: False for k in ("fused", "foreach", "capturable") if k in settings})
        state: dict[Tensor, dict[str, Any]] = {key: {}}
        try:
            self._step(twin_of(self._optimizer.__dict__, self._kind, [settings], state))
        except Exception:  # whatever it is, the first real step will tell
            return None
        return state[key]

    def _note(self, index: int, stepped: Mapping[str, Any]) -> None:
        """Keep what a step changed in a group's settings (counters, say); parts must agree."""
        before = self._optimizer.param_groups[index]
        for name, value in _changes(before, stepped):
            _, noted = self._changed.setdefault(id(before), (before, {}))
            self._keep(noted, name, value, f"'{name}' of parameter group {index}")

    def _note_attributes(self, twin: Optimizer) -> None:
        """Keep what a step changed on the optimizer itself; parts must agree."""
        for name, value in twin.__dict__.items():
            is_own = name in ("param_groups", "state")
            if not is_own and (name not in self._before or value is not self._before[name]):
                self._keep(self._attributes, name, value, f"its attribute '{name}'")

    def _keep(self, noted: dict[str, Any], name: str, value: Any, what: str) -> None:
        if name in noted and _differ(noted[name], value):
            raise self._error(
                f"{self._kind.__name__} computed {what} from some parameters at once: it couples "
                f"parameters, which are stepped in parts here. {self._remedy}"
            )
        noted[name] = value

    def end(self) -> None:
        """All parts are stepped: the optimizer and its groups show what that changed in them."""
        self._optimizer.__dict__.update(self._attributes)
        self._before = {}  # to keep nothing of it alive
        for index, (group, changed) in self._idle.items():
            if index not in self._stepped:
                group.update(changed)
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


def _changes(before: Group, after: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings of a parameter group that a step changed."""
    for name, value in after.items():
        if name != "params" and value is not before.get(name):
            yield name, value


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return not torch.equal(one, other)
    return bool(one != other)
