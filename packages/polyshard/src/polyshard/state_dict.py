"""Hooks on modules so that state dicts hold sharded, native values under original names."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from polyshard.errors import PluginError

if TYPE_CHECKING:
    from polyshard.group import ParameterGroup
    from polyshard.parameter import ShardedParameter
    from polyshard.schedule import Unit
    from polyshard.seams import StateDictAdapter


class StateDictHooks:
    """What happens around ``state_dict`` and ``load_state_dict`` of a unit's modules."""

    def __init__(self, unit: Unit) -> None:
        """Register with every module that owns a parameter of ``unit``."""
        self._unit = unit
        self._owned: dict[nn.Module, list[tuple[str, ShardedParameter, ParameterGroup]]] = {}
        for group in unit.groups:
            for parameter in group.shards.parameters:
                for owner in parameter.owners:
                    entry = (owner.name, parameter, group)
                    self._owned.setdefault(owner.module, []).append(entry)
        for module in self._owned:
            module.register_state_dict_pre_hook(self._reshard)
            module.register_load_state_dict_pre_hook(self._before_load)
            module.register_load_state_dict_post_hook(self._after_load)
            if any(g.contributions.adapters for g in unit.groups):
                # torch marks the hook with an attribute, which a bound method does not take
                module.register_state_dict_post_hook(partial(self._adapt_saved))

    def _reshard(self, *args: object, **kwargs: object) -> None:
        del args, kwargs
        self._unit.reshard()

    def _before_load(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: object
    ) -> None:
        del rest
        self._unit.reshard()
        for name, parameter, group in self._owned[module]:
            for adapter in reversed(group.contributions.adapters):
                if prefix + name in state_dict:
                    value = state_dict[prefix + name]
                    found = adapter.on_load(parameter.info, value)
                    state_dict[prefix + name] = _adapted(
                        adapter, "on_load", parameter, value, found
                    )

    def _after_load(self, *args: object, **kwargs: object) -> None:
        """``assign=True`` puts new parameters in place of ours."""
        del args, kwargs
        for group in self._unit.groups:
            group.mark_stale()

    def _adapt_saved(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: object
    ) -> None:
        del rest
        for name, parameter, group in self._owned[module]:
            for adapter in group.contributions.adapters:
                value = state_dict[prefix + name]
                found = adapter.on_save(parameter.info, value)
                state_dict[prefix + name] = _adapted(adapter, "on_save", parameter, value, found)


def _adapted(
    adapter: StateDictAdapter, method: str, parameter: ShardedParameter, given: Any, found: Any
) -> Any:
    """``found``, which an adapter made of a ``given`` value; a tensor must stay one."""
    if isinstance(given, Tensor) and not isinstance(found, Tensor):
        raise PluginError(
            f"state-dict adapter '{adapter.name}': {method} returned a {type(found).__name__} for "
            f"'{parameter.info.fqn}'; return a tensor, the one it is given where nothing changes."
        )
    return found
