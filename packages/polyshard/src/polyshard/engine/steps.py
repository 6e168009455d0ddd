"""Steps of optimizers, counted: they end what was promised of shards.

See [Note: kept parameters] of group.kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from polyshard._torch.untraced import untraced
from polyshard.exchange.freshness import Turn
from polyshard.group.group import ParameterGroup


def count_steps(turn: Turn, groups: Iterable[ParameterGroup]) -> None:
    """Have ``turn`` count every step of an optimizer that has any parameter of ``groups``."""
    counted, known = weakref.ref(turn), weakref.WeakSet(groups)

    @untraced
    def after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
        del args, kwargs
        turn = counted()
        if turn is not None and _steps_any(optimizer, known):
            turn.steps += 1

    weakref.finalize(turn, register_optimizer_step_post_hook(after_step).remove)


def _steps_any(optimizer: Optimizer, groups: Iterable[ParameterGroup]) -> bool:
    stepped = {id(p) for settings in optimizer.param_groups for p in settings["params"]}
    return any(id(p.parameter) in stepped for g in groups for p in g.shards.parameters)
