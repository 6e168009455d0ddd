"""Gradients of 2-D parameters on owners, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from polyshard import Plugin, hookimpl
from polyshard.plugins.seams import GradientLanding, GroupInfo, OwnedParameter


class InTurn(GradientLanding):
    name = "in turn"

    def __init__(self) -> None:
        self.held: dict[str, OwnedParameter] = {}
        self.heard: list[str] = []
        self._next = 0

    def owners(self, group: GroupInfo) -> Sequence[int | None]:
        found: list[int | None] = []
        for parameter in group.parameters:
            if len(parameter.shape) == 2:
                found.append(self._next % group.mesh.size())
                self._next += 1
            else:
                found.append(None)
        return found

    def hold(self, group: GroupInfo, parameters: Sequence[OwnedParameter]) -> None:
        self.held |= {owned.info.fqn: owned for owned in parameters}

    def landed(self, parameter: OwnedParameter) -> None:
        self.heard.append(parameter.info.fqn)


class Landing(Plugin):
    """Whole gradients on ranks in turn."""

    name = "landing"

    def __init__(self) -> None:
        self.landing = InTurn()

    @hookimpl
    def polyshard_gradient_landing(self, group: GroupInfo) -> GradientLanding:
        return self.landing
