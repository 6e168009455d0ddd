"""Optimizers beside the engine: how often they step, and what they miss.

[Note: steps that train nothing]
Two mistakes leave a step of an optimizer without effect, and torch says nothing of either. An
optimizer that was built before ``fully_shard`` holds the parameters that were replaced: they get no
gradients any more. And gradients that wait to be reduced are not in ``.grad``: a step passes them
by, and the next one that finds them uses them as if they were of its own batch. The engine refuses
the first, where the optimizer steps, and warns of the second.

Replaced parameters are freed as soon as nothing holds them, so a model whose optimizer came later
is not searched for: the garbage collector is asked only where one of them is still alive.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from polyshard._torch.untraced import untraced
from polyshard.errors import LifecycleError, warn
from polyshard.group.group import ParameterGroup
from polyshard.program.freshness import Turn


def watch_steps(turn: Turn, groups: Iterable[ParameterGroup]) -> None:
    """Have ``turn`` count every step of an optimizer that has any parameter of ``groups``.

    A step that leaves gradients of a group behind is warned of.
    """
    counted, known = weakref.ref(turn), weakref.WeakSet(groups)

    @untraced
    def after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
        del args, kwargs
        turn = counted()
        held = {id(p) for given in optimizer.param_groups for p in given["params"]}
        if turn is not None and any(True for group in known for _ in _held_of(group, held)):
            turn.steps += 1
            warn(_left_waiting(optimizer, held, known))

    weakref.finalize(turn, register_optimizer_step_post_hook(after_step).remove)


def _held_of(group: ParameterGroup, held: Set[int]) -> Iterator[str]:
    """Names of the parameters of ``group`` among those with these identities."""
    return (p.info.fqn for p in group.shards.parameters if id(p.parameter) in held)


def _left_waiting(
    optimizer: Optimizer, held: Set[int], groups: Iterable[ParameterGroup]
) -> Iterator[str]:
    for group in groups:
        names = list(_held_of(group, held)) if group.gradients.waiting else []
        if names:
            yield (
                f"{type(optimizer).__name__}.step() was called while gradients of group "
                f"'{group.name}' ({_some(names)}) wait to be reduced: the step does not see them. "
                "Run the last backward before step() with gradient synchronisation "
                "(set_requires_gradient_sync(True), or outside of no_sync())."
            )


@dataclass(frozen=True)
class _Replaced:
    """What ``fully_shard`` replaced, by identity, and what it is called."""

    parameters: Mapping[int, tuple[weakref.ref[nn.Parameter], str]]

    def names_in(self, optimizer: Optimizer) -> list[str]:
        """Of those that ``optimizer`` holds."""
        held: list[Tensor] = [p for given in optimizer.param_groups for p in given["params"]]
        found = [(p, *self.parameters[id(p)]) for p in held if id(p) in self.parameters]
        return [name for p, original, name in found if original() is p]

    def refuse(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Called before a step; others may have exchanged the parameters meanwhile."""
        del args, kwargs
        names = self.names_in(optimizer)
        if names:
            raise LifecycleError(
                f"this {type(optimizer).__name__} was built before fully_shard() and holds "
                f"{len(names)} of the parameters that it replaced ({_some(names)}): they have no "
                "gradients, and a step would not change the model. Build the optimizer after "
                "fully_shard(), from model.parameters()."
            )


def refuse_replaced(groups: Iterable[ParameterGroup]) -> None:
    """Have optimizers that hold parameters from before ``fully_shard`` refuse to step.

    Called once a root. See [Note: steps that train nothing].
    """
    alive = {
        id(parameter): (original, sharded.info.fqn)
        for group in groups
        for original, sharded in zip(group.take_originals(), group.shards.parameters, strict=True)
        if (parameter := original()) is not None
    }
    if not alive:
        return
    replaced = _Replaced(alive)
    for found in gc.get_objects():
        if issubclass(type(found), Optimizer) and replaced.names_in(found):
            found.register_step_pre_hook(replaced.refuse)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
