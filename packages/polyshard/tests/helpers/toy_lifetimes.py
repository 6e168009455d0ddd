"""What plugins make for groups: let go of, and saved."""

from __future__ import annotations

from typing import Any

import torch

from polyshard import Plugin, hookimpl
from polyshard.plugins.seams import GroupInfo


class Kept:
    """A number that training changes, and this rank's."""

    def __init__(self, rank: int) -> None:
        self.value = torch.zeros(2)
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "rank": self.rank}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value.copy_(state_dict["value"])
        self.rank = state_dict["rank"]


class Lasting(Plugin):
    """Keeps something for groups of modules whose class name holds ``only``, until torn down."""

    name = "lasting"

    def __init__(self, only: str = "", log: list[str] | None = None) -> None:
        self.only = only
        self.kept: dict[Any, Kept] = {}
        self.log: list[str] = [] if log is None else log

    @hookimpl
    def polyshard_plugin_state(self, group: GroupInfo) -> Kept | None:
        kinds = {p.module_class.__name__ for p in group.parameters}
        if not any(self.only in kind for kind in kinds):
            return None
        return self.kept.setdefault(group.identity, Kept(group.rank))

    @hookimpl
    def polyshard_teardown(self, group: GroupInfo) -> None:
        self.kept.pop(group.identity, None)
        self.log.append(f"{self.name} {group.identity}")


class Failing(Lasting):
    """Fails when it is torn down."""

    name = "failing"

    @hookimpl
    def polyshard_teardown(self, group: GroupInfo) -> None:
        super().polyshard_teardown(group)
        raise OSError(f"{group.identity} is busy")
