"""What a model's parameters are called, also while modules hold them gathered."""

from __future__ import annotations

from torch import Tensor, nn

import polyshard
from polyshard.engine.root import groups_of

UNSHARDED = "(not sharded)"


def parameters_at_rest(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, in the order of the model: of sharded ones the shards, whatever is gathered.

    After an evaluation modules may hold what was gathered for it, in another dtype.
    """
    shards = sharded_parameters(model)
    return {name: shards.get(name, held) for name, held in model.named_parameters()}


def sharded_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The shards of those that are sharded, by every name that they have."""
    prefixes = {id(module): name for name, module in model.named_modules()}
    return {
        f"{prefixes[id(owner.module)]}.{owner.name}".removeprefix("."): sharded.parameter
        for group in groups_of(model)
        for sharded in group.shards.parameters
        for owner in sharded.owners
        if id(owner.module) in prefixes
    }


def groups_by_name(model: nn.Module) -> dict[str, str]:
    """In which group each parameter is; those that polyshard was told to ignore are in none."""
    groups = {p.fqn: g.name for g in polyshard.describe(model).groups for p in g.parameters}
    return {name: groups.get(name, UNSHARDED) for name, _ in model.named_parameters()}
