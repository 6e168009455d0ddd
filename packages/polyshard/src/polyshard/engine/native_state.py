"""Optimizer state in the form in which its parameters are saved.

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from polyshard._torch.private import local_tensor
from polyshard._torch.untraced import untraced
from polyshard.engine.trees import map_tensors
from polyshard.errors import CheckpointError, LifecycleError, SettingError, warn
from polyshard.params.parameter import ShardedParameter
from polyshard.plugins.seams import ParamInfo, StateDictAdapter, overrides

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


class HasAdapted(Protocol):
    """Who knows which parameters have adapters: a unit's state-dict hooks."""

    def adapted(self) -> Iterator[tuple[int, Adapted]]:
        """Those parameters, by the ``id`` of every object that is one of them now."""
        ...


class NativeState:
    """Converts the state dicts of optimizers. See [Note: native optimizer state]."""

    def __init__(self) -> None:
        """Look at every optimizer's first step from now on."""
        self._owners: weakref.WeakSet[HasAdapted] = weakref.WeakSet()
        self._attached: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._others: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = (
            weakref.WeakKeyDictionary()
        )
        register_optimizer_step_pre_hook(untraced(self._before_step))

    def add(self, owner: HasAdapted) -> None:
        """Convert the state of its parameters as long as ``owner`` lives."""
        self._owners.add(owner)

    def attach(self, optimizer: Optimizer) -> None:
        """See :func:`attach_optimizer`."""
        if optimizer not in self._attached:
            self._attached.add(optimizer)
            optimizer.register_state_dict_post_hook(self._after_saving)
            optimizer.register_load_state_dict_pre_hook(self._before_loading)

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        del args, kwargs
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
                    name: map_tensors(functools.partial(convert, adapted, str(name)), value)
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
    """Whether an adapter left every element of a probe as it was, wherever it is now."""
    if not isinstance(value, Tensor) or value.dtype != dtype:
        return False
    local = local_tensor(value) if isinstance(value, DTensor) else value
    return local.is_meta or bool((local == PROBE).all())


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
