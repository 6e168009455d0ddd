"""State-dict adapters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polyshard import Plugin, hookimpl
from polyshard.plugins.seams import GroupInfo, ParamInfo, StateDictAdapter


@dataclass(frozen=True)
class Negating(StateDictAdapter):
    """Stores values with the other sign."""

    name: str = "negating"
    settings: str = ""
    seen: list[str] = field(default_factory=list)

    def on_save(self, param: ParamInfo, value: Any) -> Any:
        self.seen.append(param.fqn)
        return -value

    def on_load(self, param: ParamInfo, value: Any) -> Any:
        return -value


class Adapting(Plugin):
    """Contributes a state-dict adapter."""

    name = "adapting"

    @hookimpl
    def polyshard_state_dict_adapter(self, group: GroupInfo) -> Negating:
        return Negating()
