"""Optimizers beside the engine: how often they step, what they miss, and what they make stale.

[Note: steps that train nothing]
Three mistakes leave a step of an optimizer without effect, and torch reports none of them. An
optimizer that was built before ``fully_shard`` holds the parameters that were replaced, and one
that was built while parameters were gathered holds unsharded ones: neither get gradients that last
until the step. And gradients that wait to be reduced are not in ``.grad``: a step passes them by,
and the next one that finds them uses them as if they were of its own batch. The engine refuses the
first two, where the optimizer steps, and warns of the third.

Replaced parameters are freed as soon as nothing holds them, so a model whose optimizer came later
is not searched for: the garbage collector is asked only where one of them is still alive. A module
outside of all units may hold it too, by which a tie is lost: that is warned of.

[Note: steps and gathered parameters]
A step changes shards, so unsharded parameters of the same group hold old values after it. Modules
would show them in ``parameters()`` until the next forward, for example to code that publishes
weights. So the group is freed before the step. All ranks free the same groups, since they gathered
the same ones and step the same optimizers. Within a backward, the end of the iteration frees them.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from polyshard.engine.every_step import after_every_step, before_every_step
from polyshard.engine.step import Reductions
from polyshard.errors import LifecycleError, UntiedWarning, warn
from polyshard.group.group import ParameterGroup
from polyshard.transport.base import Turn


def watch_steps(turn: Turn, groups: Iterable[ParameterGroup]) -> None:
    """Have ``turn`` count every step of an optimizer that has any parameter of ``groups``.

    A step that leaves gradients of a group behind is warned of.
    """
    known = weakref.WeakSet(groups)

    def after_step(turn: Turn, optimizer: Optimizer) -> None:
        held = {id(p) for given in optimizer.param_groups for p in given["params"]}
        if any(True for group in known for _ in _held_of(group, held)):
            turn.steps += 1
            warn(_left_waiting(optimizer, held, known))

    after_every_step(turn, after_step)


def prepare_steps(turn: Turn, groups: Iterable[ParameterGroup], reductions: Reductions) -> None:
    """Before optimizers step, finish reductions in flight, and free what the step makes stale.

    Refuses optimizers that hold what was gathered. Called once a root. See [Note: steps and
    gathered parameters].
    """
    in_flight, every = weakref.ref(reductions), weakref.WeakSet(groups)
    seen: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[weakref.ref[ParameterGroup]]]]
    seen = weakref.WeakKeyDictionary()  # what each steps, and of how many parameters it was found

    def before_step(turn: Turn, optimizer: Optimizer) -> None:
        count = sum(len(given["params"]) for given in optimizer.param_groups)
        reductions = in_flight()
        if reductions is None:
            return
        if optimizer not in seen or seen[optimizer][0] != count:
            held = {id(p) for given in optimizer.param_groups for p in given["params"]}
            _refuse_gathered(optimizer, held, every)
            stepped = [weakref.ref(g) for g in every if any(True for _ in _held_of(g, held))]
            seen[optimizer] = count, stepped
        if not (turn.in_forward or turn.in_backward):
            if seen[optimizer][1]:
                reductions.finish()
            for reference in seen[optimizer][1]:
                group = reference()
                if group is not None and not group.is_sharded and group.is_trained:
                    group.reshard()

    before_every_step(turn, before_step)


def _refuse_gathered(
    optimizer: Optimizer, held: Set[int], groups: Iterable[ParameterGroup]
) -> None:
    found = sorted(name for group in groups for name in group.unsharded_names(held))
    if found:
        raise LifecycleError(
            f"this {type(optimizer).__name__} was built while parameters were gathered and holds "
            f"{len(found)} unsharded ones ({_some(found)}): their gradients go to the sharded "
            "parameters, and a step would not change the model. Build the optimizer right after "
            "fully_shard(), or call reshard() on the model before."
        )


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
        groups = getattr(optimizer, "param_groups", ())  # none of one that only holds others
        held: list[Tensor] = [p for given in groups for p in given["params"]]
        found = [(p, *self.parameters[id(p)]) for p in held if id(p) in self.parameters]
        return [name for p, original, name in found if original() is p]

    def kept_by(self, module: nn.Module) -> Iterator[tuple[str, str]]:
        """Those that ``module`` has, by its name and by that of the model."""
        for own, parameter in module.__dict__.get("_parameters", {}).items():
            original, name = self.parameters.get(id(parameter), (None, ""))
            if original is not None and original() is parameter:
                yield own, name

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


def refuse_replaced(groups: Iterable[ParameterGroup], root: nn.Module) -> None:
    """Have optimizers that hold parameters from before ``fully_shard`` refuse to step.

    Called once a ``root``. Warns of modules that hold such parameters. See [Note: steps that train
    nothing].
    """
    alive = {
        id(parameter): (original, sharded.info.fqn)
        for group in groups
        # a group that took the place of another has none
        for original, sharded in zip(group.take_originals(), group.shards.parameters, strict=False)
        if (parameter := original()) is not None
    }
    if not alive:
        return
    replaced, modules = _Replaced(alive), []
    for found in gc.get_objects():
        kind = type(found)
        if issubclass(kind, Optimizer) and replaced.names_in(found):
            if hasattr(found, "_optimizer_step_pre_hooks"):  # else its groups are another's
                found.register_step_pre_hook(replaced.refuse)
        elif issubclass(kind, nn.Module) and any(replaced.kept_by(found)):
            modules.append(weakref.ref(found))
        del found
    if modules:
        gc.collect()  # modules that nothing can use any more count for nothing
        names = {id(module): f"'{name}'" for name, module in root.named_modules()}
        for module in (m for reference in modules if (m := reference()) is not None):
            place = names.get(id(module), f"a {type(module).__name__} outside of the model")
            for own, name in replaced.kept_by(module):
                _warn_of_untied(place, own, name)


def _warn_of_untied(place: str, own: str, name: str) -> None:
    warnings.warn(
        f"{place} keeps as its {own} what '{name}' was before fully_shard: they were one "
        f"parameter, and are two now. '{name}' is trained sharded; {place} computes with the old "
        "values. Shard both in one model, so that one unit contains them; if they are to be two, "
        "filter polyshard.errors.UntiedWarning.",
        UntiedWarning,
        stacklevel=2,
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
