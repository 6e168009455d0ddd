"""Hooks on modules so that state dicts hold sharded, native values under original names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyshard._torch.private import local_tensor
from polyshard.engine.native_state import Adapted, native_state
from polyshard.engine.unit import Unit
from polyshard.errors import CheckpointError, PeerError, PluginError
from polyshard.group.group import ParameterGroup
from polyshard.params.parameter import ShardedParameter
from polyshard.plugins.contributions import ADAPTERS
from polyshard.plugins.seams import StateDictAdapter

Owned = tuple[str, ShardedParameter, ParameterGroup]
"""The name under which a module registers a parameter, and the parameter's group."""


class StateDictHooks:
    """What happens around ``state_dict`` and ``load_state_dict`` of a unit's modules."""

    def __init__(self, unit: Unit) -> None:
        """Register with every module that owns a parameter of ``unit``."""
        self._unit = unit
        self._adapted: dict[ShardedParameter, Adapted] = {}
        self._groups: tuple[ParameterGroup, ...] = ()
        self._owned: dict[nn.Module, list[Owned]] = {}
        self._modules = {module: None for group in unit.groups for module in group.users()}
        for module in self._modules:
            module.register_state_dict_pre_hook(self._reshard)
            module.register_load_state_dict_pre_hook(self._before_load)
            module.register_load_state_dict_post_hook(self._after_load)
            if self._has_adapters:
                # torch marks the hook with an attribute, which a bound method does not take
                module.register_state_dict_post_hook(partial(self._adapt_saved))
        if self._has_adapters:
            native_state().add(self)

    @property
    def _has_adapters(self) -> bool:
        return any(group.contributions.all(ADAPTERS) for group in self._unit.groups)

    def _held(self, module: nn.Module) -> list[Owned]:
        """What ``module`` registers of the unit's groups, which may be others than at first."""
        groups = tuple(self._unit.groups)
        if groups != self._groups:  # looked through once, not by every module's hook
            self._groups, self._owned = groups, {}
            for group in groups:
                for parameter in group.shards.parameters:
                    for owner in parameter.owners:
                        entry = (owner.name, parameter, group)
                        self._owned.setdefault(owner.module, []).append(entry)
        return self._owned.get(module, [])

    def _reshard(self, *args: object, **kwargs: object) -> None:
        del args, kwargs
        try:
            self._unit.reshard()
        except PeerError:  # a gather that nobody will complete: shards are whole without it
            for group in self._unit.groups:
                group.abandon()

    def _before_load(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: object
    ) -> None:
        del rest
        self._unit.reshard()
        for name, parameter, group in self._held(module):
            adapters = group.contributions.all(ADAPTERS)
            if adapters and prefix + name in state_dict:
                _refuse_itself(parameter, state_dict[prefix + name], adapters)
            for adapter in reversed(adapters):
                if prefix + name in state_dict:
                    value = state_dict[prefix + name]
                    found = adapter.on_load(parameter.info, value)
                    state_dict[prefix + name] = _adapted(
                        adapter, "on_load", parameter, value, found
                    )

    def _after_load(self, *args: object, **kwargs: object) -> None:
        """Take over the parameters that ``assign=True`` put in place of the sharded ones."""
        del args, kwargs
        for group in self._unit.groups:
            group.adopt_replaced()

    def _adapt_saved(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: object
    ) -> None:
        del rest
        for name, parameter, group in self._held(module):
            for adapter in group.contributions.all(ADAPTERS):
                value = state_dict[prefix + name]
                found = adapter.on_save(parameter.info, value)
                state_dict[prefix + name] = _adapted(adapter, "on_save", parameter, value, found)

    def adapted(self) -> Iterator[tuple[int, Adapted]]:
        """Parameters with adapters, by the ``id`` of every object that is one of them now."""
        before, self._adapted = self._adapted, {}
        for module in self._modules:
            for name, parameter, group in self._held(module):
                adapters = group.contributions.all(ADAPTERS)
                if not adapters:
                    continue
                known = self._adapted.get(parameter) or before.get(parameter)
                found = self._adapted[parameter] = known or Adapted(parameter, adapters)
                yield id(parameter.parameter), found
                yield id(module._parameters.get(name)), found


def _refuse_itself(
    parameter: ShardedParameter, value: object, adapters: Sequence[StateDictAdapter]
) -> None:
    """Refuse the parameter as a value for itself, where a plugin keeps another form of it.

    It would be converted although it never was in the saved form.

    Raises:
        CheckpointError: naming the parameter.
    """
    own = parameter.parameter.detach()
    if not _is_same(value, own):
        return
    saved: Any = own
    for adapter in adapters:
        saved = adapter.on_save(parameter.info, saved)
    if not _is_same(saved, own):
        raise CheckpointError(
            f"'{parameter.info.fqn}' cannot be loaded from itself, because a plugin's state-dict "
            "adapter saves it in another form. Load what model.state_dict() returns, or values in "
            "that form."
        )


def _is_same(value: object, own: Tensor) -> bool:
    """Whether both show the same memory in the same way; alike on ranks whose part is empty."""
    if not (isinstance(value, DTensor) and isinstance(own, DTensor)):
        return value is own
    return value.shape == own.shape and local_tensor(value).is_set_to(local_tensor(own))


def _adapted(
    adapter: StateDictAdapter, method: str, parameter: ShardedParameter, given: Any, found: Any
) -> Any:
    """``found``, what an adapter made of ``given``, checked: of a tensor it must make a tensor."""
    if isinstance(given, Tensor) and not isinstance(found, Tensor):
        raise PluginError(
            f"state-dict adapter '{adapter.name}': {method} returned a {type(found).__name__} for "
            f"'{parameter.info.fqn}'; return a tensor, the one it is given where nothing changes."
        )
    return found
