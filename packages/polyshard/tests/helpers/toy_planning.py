"""What is asked while plans are made: constraints, facts, preparation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from polyshard import Plugin, hookimpl
from polyshard.plugins.seams import GroupInfo, ParamInfo, ShardingConstraint


@dataclass(frozen=True)
class Blocks(ShardingConstraint):
    """Keeps blocks of so many elements on one rank."""

    elements: int
    name: str = "blocks"
    settings: str = ""

    def block_elements(self, param: ParamInfo) -> int:
        return self.elements


@dataclass(frozen=True, eq=False)
class Constrained(Plugin):
    """Contributes a sharding constraint."""

    elements: int
    name = "constrained"

    @hookimpl
    def polyshard_sharding_constraint(self, group: GroupInfo) -> Blocks:
        return Blocks(self.elements)


class Signing(Plugin):
    """Says the sum of every parameter."""

    name = "signing"

    @hookimpl
    def polyshard_parameter_facts(self, tensor: Tensor, param: ParamInfo) -> str | None:
        return f"sum {float(tensor.sum())}" if param.requires_grad else None


class Preparing(Plugin):
    """Adds a marker to every module before it is sharded."""

    name = "preparing"

    @hookimpl
    def polyshard_prepare_model(self, module: nn.Module) -> None:
        module.prepared = True  # type: ignore[assignment]
