"""State dicts of sharded modules, and of their optimizers: native values under original names.

[Note: native optimizer state]
Where a state-dict adapter changes a parameter on its way into a state dict, the state that the
optimizer keeps for it has to follow, or what was saved with a plugin would not load without it.
Optimizers know nothing of models; they have hooks for their state dicts, which
:func:`attach_optimizer` registers. The first step of an optimizer does that by itself, through a
hook that torch has for the steps of all optimizers. So it has happened before there is any state to
save, and before torch's ``set_optimizer_state_dict`` loads some (it makes a step first). Only
``optimizer.load_state_dict`` before the first step comes too early: that step refuses what was
loaded.

What follows are tensors of the sharded parameter's shape, and only if the adapter *moves* elements.
One that changes values cannot say by ``on_save`` what becomes of momentum or of squared gradients;
it has methods of its own for that, or its state stays in the plugin's terms, with a warning.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.optim import Optimizer

from polyshard._torch.private import local_tensor
from polyshard.engine.every_step import before_every_step
from polyshard.engine.trees import map_tensors
from polyshard.engine.unit import Unit
from polyshard.errors import (
    CheckpointError,
    LifecycleError,
    PeerError,
    PluginError,
    SettingError,
    warn,
)
from polyshard.group.group import ParameterGroup
from polyshard.params.parameter import ShardedParameter
from polyshard.plugins.contributions import ADAPTERS
from polyshard.plugins.seams import ParamInfo, StateDictAdapter, overrides

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

    def __deepcopy__(self, memo: object) -> StateDictHooks:
        """A copy of a module, which has no parameter of the unit, has no use for others."""
        return self

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
        except PeerError:  # a gather that will never complete: shards are whole without it
            for group in self._unit.groups:
                group.abandon()

    def _before_load(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: object
    ) -> None:
        del rest
        self._unit.context.reductions.finish()  # into gradients of the parameters that go
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
        """Take over the parameters that ``assign=True`` put where the sharded ones were."""
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


# Of optimizers --------------------------------------------------------------------------------

PROBE = 3.0
"""What a parameter is filled with to see whether an adapter moves values or changes them."""

StateDict = dict[str, Any]


def attach_optimizer(optimizer: Optimizer) -> None:
    """Have state dicts of ``optimizer`` follow the state-dict adapters of its parameters.

    Its first step does so by itself. Needed, once, before ``optimizer.load_state_dict`` of an
    optimizer that has not made a step, where a plugin contributes an adapter; harmless always.

    Raises:
        SettingError: when it is no optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise SettingError(
            f"attach_optimizer takes a torch.optim.Optimizer, got {type(optimizer).__name__}."
        )
    native_state().attach(optimizer)


@functools.cache
def native_state() -> NativeState:
    """The converter of this process: torch's hook on the steps of all optimizers is global too."""
    return NativeState()


@dataclass(frozen=True)
class _Form:
    """One parameter's shape as it is sharded and as it is saved, and whether state can follow."""

    sharded: torch.Size
    saved: torch.Size
    follows: bool


class Adapted:
    """A sharded parameter and its adapters, in plugin order."""

    def __init__(self, parameter: ShardedParameter, adapters: tuple[StateDictAdapter, ...]) -> None:
        self.parameter = parameter
        self.adapters = adapters
        self._form: _Form | None = None

    @property
    def info(self) -> ParamInfo:
        """The parameter as adapters know it."""
        return self.parameter.info

    @property
    def form(self) -> _Form:
        """Shapes and whether state follows: asked of the adapters once, with a filled probe."""
        if self._form is None:
            self._form = self._probed()
        return self._form

    def _probed(self) -> _Form:
        sharded = self.parameter.parameter
        value: Any = torch.full_like(sharded, PROBE)
        follows = True
        for adapter in self.adapters:
            if isinstance(value, Tensor):
                before, value = value.dtype, adapter.on_save(self.info, value)
                follows &= _has_methods(adapter) or _only_moved(value, before)
        if not (follows and isinstance(value, Tensor)):
            warn([_unfollowed(self.info, self.adapters)])
            return _Form(sharded.shape, sharded.shape, follows=False)
        return _Form(sharded.shape, value.shape, follows=True)

    def save(self, name: str, value: Tensor) -> Any:
        """A tensor of optimizer state in the form it is saved in."""
        if value.ndim == 0 or value.shape != self.form.sharded:
            if value.numel() > 1:
                warn([_other_shape(self.info, name, value)])
            return value
        for adapter in self.adapters:
            value = adapter.on_save_state(self.info, name, value)
        return value

    def load(self, name: str, value: Tensor) -> Any:
        """A tensor of saved state in the form the optimizer works with."""
        form = self.form
        if value.ndim == 0 or value.shape != form.saved:
            if value.ndim and value.shape == form.sharded:
                raise CheckpointError(_not_native(self.info, name, form))
            return value
        for adapter in reversed(self.adapters):
            value = adapter.on_load_state(self.info, name, value)
        return _placed_like(value, self.parameter.parameter)


class NativeState:
    """Converts the state dicts of optimizers. See [Note: native optimizer state]."""

    def __init__(self) -> None:
        """Look at every optimizer's first step from now on."""
        self._owners: weakref.WeakSet[StateDictHooks] = weakref.WeakSet()
        self._attached: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._others: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = (
            weakref.WeakKeyDictionary()
        )
        before_every_step(self, NativeState._before_step)

    def add(self, owner: StateDictHooks) -> None:
        """Convert the state of its parameters as long as ``owner`` lives."""
        self._owners.add(owner)

    def attach(self, optimizer: Optimizer) -> None:
        """See :func:`attach_optimizer`."""
        if optimizer not in self._attached:
            self._attached.add(optimizer)
            optimizer.register_state_dict_post_hook(self._after_saving)
            optimizer.register_load_state_dict_pre_hook(self._before_loading)

    def _before_step(self, optimizer: Optimizer) -> None:
        if optimizer in self._attached:
            return
        key = (sum(len(g["params"]) for g in optimizer.param_groups), len(self._owners))
        if self._others.get(optimizer) == key:
            return
        found = dict(self._adapted(optimizer))
        if not found:
            self._others[optimizer] = key
            return
        state, every = optimizer.state, _parameters(optimizer)
        early = [a.info.fqn for i, a in found.items() if state.get(every[i])]
        if early:
            raise LifecycleError(
                f"{type(optimizer).__name__} has state for {early} before its first step. It was "
                "loaded in its saved form, but plugins change the form of these parameters. Call "
                "polyshard.attach_optimizer(optimizer) before load_state_dict()."
            )
        self.attach(optimizer)

    def _adapted(self, optimizer: Optimizer) -> Iterator[tuple[int, Adapted]]:
        """Those of the optimizer's parameters that have adapters, by their place in its groups."""
        known = {key: adapted for owner in self._owners for key, adapted in owner.adapted()}
        for place, parameter in enumerate(_parameters(optimizer)):
            if id(parameter) in known:
                yield place, known[id(parameter)]

    @torch.no_grad()
    def _after_saving(self, optimizer: Optimizer, state_dict: StateDict) -> StateDict:
        return self._converted(optimizer, state_dict, Adapted.save)

    @torch.no_grad()
    def _before_loading(self, optimizer: Optimizer, state_dict: StateDict) -> StateDict:
        return self._converted(optimizer, state_dict, Adapted.load)

    def _converted(
        self,
        optimizer: Optimizer,
        state_dict: StateDict,
        convert: Callable[[Adapted, str, Tensor], Any],
    ) -> StateDict:
        """A state dict with converted tensors; the one given shares memory with the optimizer."""
        every = dict(state_dict["state"])
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for place, adapted in self._adapted(optimizer):
            key = keys[place] if place < len(keys) else None  # torch says so if groups do not fit
            state = every.get(key)
            if isinstance(state, Mapping) and state and adapted.form.follows:
                every[key] = {
                    name: map_tensors(partial(convert, adapted, str(name)), value)
                    for name, value in state.items()
                }
        return {**state_dict, "state": every}


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _has_methods(adapter: StateDictAdapter) -> bool:
    return overrides(adapter.on_save_state, StateDictAdapter.on_save_state) and overrides(
        adapter.on_load_state, StateDictAdapter.on_load_state
    )


def _only_moved(value: object, dtype: torch.dtype) -> bool:
    """Whether an adapter left every element of a probe as it was, wherever it is now.

    The same on all ranks: those that hold no rows of it would say so of any adapter.
    """
    if not isinstance(value, Tensor) or value.dtype != dtype:
        return False
    if value.is_meta:
        return True
    if not isinstance(value, DTensor):
        return bool((value == PROBE).all())
    kept, mesh = (local_tensor(value) == PROBE).all().to(torch.uint8), value.device_mesh
    everywhere = DTensor.from_local(kept, mesh, [Partial("min")] * mesh.ndim, run_check=False)
    return bool(everywhere.full_tensor())


def _placed_like(value: object, parameter: Tensor) -> object:
    """``value`` placed like the parameter and contiguous, as optimizers expect it."""
    if isinstance(value, DTensor) and isinstance(parameter, DTensor):
        if value.placements != parameter.placements:
            value = value.redistribute(parameter.device_mesh, parameter.placements)
        return value if local_tensor(value).is_contiguous() else value.contiguous()
    return value.contiguous() if isinstance(value, Tensor) else value


def _unfollowed(info: ParamInfo, adapters: tuple[StateDictAdapter, ...]) -> str:
    names = ", ".join(f"'{adapter.name}'" for adapter in adapters)
    return (
        f"optimizer state of '{info.fqn}' is saved as the plugins see it: the state-dict adapter "
        f"of {names} changes values, which does not say what becomes of it. Load it with the same "
        "plugins, or give the adapter on_save_state and on_load_state"
    )


def _other_shape(info: ParamInfo, name: str, value: Tensor) -> str:
    return (
        f"optimizer state '{name}' of '{info.fqn}' is saved as the plugins see it: it has the "
        f"shape {tuple(value.shape)}, not the parameter's. Load it with the same plugins"
    )


def _not_native(info: ParamInfo, name: str, form: _Form) -> str:
    return (
        f"optimizer state '{name}' of '{info.fqn}' has the shape {tuple(form.sharded)} in which it "
        f"is sharded; saved state has {tuple(form.saved)}, like the saved parameter. It was saved "
        "by something that did not know the plugin's state-dict adapter: save it again with "
        "polyshard.attach_optimizer(optimizer)"
    )
