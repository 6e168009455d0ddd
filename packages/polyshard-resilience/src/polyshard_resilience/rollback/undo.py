"""Everything that a step may change before its optimizers do, and the way back."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from polyshard._torch.private import root_mesh
from polyshard._torch.random_state import RandomState
from polyshard.engine.keeping import load_plugin_state_dict, plugin_state_dict
from polyshard.engine.root import groups_of, units_below
from polyshard.engine.unit import RootContext
from polyshard.errors import SettingError
from polyshard.params.parameter import ShardedParameter
from polyshard.plugins.seams import Stateful
from polyshard_resilience._torch_private import (
    ScalerStages,
    await_devices,
    may_be_written,
    on_devices,
)
from polyshard_resilience.alarm.current import current_alarm
from polyshard_resilience.rollback.copies import Kept, Memory
from polyshard_resilience.rollback.optimizers import OptimizerUndo, StepMemory


@dataclass(frozen=True)
class Scope:
    """What takes part in an attempt."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    also: tuple[Stateful, ...]

    @classmethod
    def of(
        cls,
        caller: str,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        also: Sequence[Stateful],
    ) -> Scope:
        """Of what a user passed to ``caller``.

        Raises:
            SettingError: when nothing of ``model`` is sharded, or something cannot take part.
        """
        groups_of(model)
        every = tuple(optimizers) if isinstance(optimizers, Sequence) else (optimizers,)
        for optimizer in every:
            if not isinstance(optimizer, Optimizer):
                raise SettingError(
                    f"{caller} takes torch.optim.Optimizer objects, got {type(optimizer).__name__}."
                )
        for state in also:
            if not isinstance(state, Stateful):
                raise SettingError(
                    f"also={type(state).__name__}: it cannot be put back, because it has no "
                    "state_dict() and load_state_dict()."
                )
        return cls(model, every, tuple(also))

    @property
    def ranks(self) -> tuple[int, ...]:
        """All that may wait for each other in a step: those of the whole meshes of the model."""
        found: set[int] = set()
        for group in groups_of(self.model):
            found.update(root_mesh(group.roles.mesh).mesh.flatten().tolist())
        return tuple(sorted(found))

    @property
    def meshes_to_meet(self) -> list[DeviceMesh]:
        """Of units that no forward has reached: there, ranks wait for each other to meet."""
        return [u.roles.mesh for _, _, u in units_below(self.model) if u.is_root is None]

    @property
    def contexts(self) -> list[RootContext]:
        """Of every root in the model, and of units that no forward has reached."""
        return list({id(u.context): u.context for _, _, u in units_below(self.model)}.values())

    def parameters(self) -> Iterator[Tensor]:
        """Every parameter that an optimizer or the engine knows, as it rests between steps."""
        found = {id(p.parameter): p.parameter for p in self._sharded()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                found.update((id(p), p) for p in group["params"])
        yield from found.values()

    def _sharded(self) -> Iterator[ShardedParameter]:
        return (p for group in groups_of(self.model) for p in group.shards.parameters)


@dataclass
class Memories:
    """Of one model: what attempts copy things into, kept from one to the next."""

    entry: Memory = field(default_factory=Memory)
    plugins: Memory = field(default_factory=Memory)
    steps: weakref.WeakKeyDictionary[Optimizer, StepMemory] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    @property
    def nbytes(self) -> int:
        """What all of it takes on the host."""
        steps = sum(memory.nbytes for memory in self.steps.values())
        return self.entry.nbytes + self.plugins.nbytes + steps


@functools.cache
def _every() -> weakref.WeakKeyDictionary[nn.Module, Memories]:
    return weakref.WeakKeyDictionary()


def memories_of(model: nn.Module) -> Memories:
    """The memory that attempts of ``model`` share: there is one at a time."""
    return _every().setdefault(model, Memories())


class Undo:
    """The state before an attempt: kept when it begins, completed as optimizers come to step."""

    def __init__(self, scope: Scope) -> None:
        """Keep gradients, buffers, random numbers, and what plugins and ``also`` keep."""
        self._scope = scope
        self._memories = memories_of(scope.model)
        self._optimizers = {id(o): OptimizerUndo(o) for o in scope.optimizers}
        self._kept: dict[int, None] = {}
        self._waiting = [context.remember() for context in scope.contexts]
        _await_gradients(scope)
        self._plugins = Kept(self._memories.plugins)
        self._plugin_state = self._plugins.add(plugin_state_dict(scope.model))
        self._also = [self._plugins.add(state.state_dict()) for state in scope.also]
        self._plugins.take()
        self._values = Kept(self._memories.entry)
        self._gradients = [(p, p.grad) for p in scope.parameters()]
        self._values.add([g for _, g in self._gradients if g is not None and not g.is_meta])
        self._buffers = [_Buffers.of(module) for module in scope.model.modules()]
        buffers = [b for held in self._buffers for b in held.values()]
        self._values.add([b for b in buffers if not b.is_inference()])
        self._values.take()
        self._inferred = Kept(Memory())
        self._inferred.add([b for b in buffers if b.is_inference()])
        self._inferred.take()
        self._scalers = [ScalerStages(s) for s in scope.also if isinstance(s, torch.amp.GradScaler)]
        self._random = RandomState().state_dict()

    def keep(self, optimizer: Optimizer) -> None:
        """``optimizer`` is about to step: copy what it may change, unless that was done before."""
        memory = self._memories.steps.setdefault(optimizer, StepMemory())
        self._kept[id(optimizer)] = None
        self._optimizers[id(optimizer)].keep(memory)

    def put_back(self) -> None:
        """Go back, without talking to any other rank."""
        for context in self._scope.contexts:
            context.reset()
        for _, _, unit in units_below(self._scope.model):
            if unit.is_root is None:
                unit.reset()
        # The last first: another may have stepped the same parameters before.
        for index in (*reversed(self._kept), *(self._optimizers.keys() - self._kept)):
            self._optimizers[index].put_back()
        self._put_back_values()
        load_plugin_state_dict(self._scope.model, self._plugins.afresh(self._plugin_state))
        for state, kept in zip(self._scope.also, self._also, strict=True):
            state.load_state_dict(self._plugins.afresh(kept))
        for stages in self._scalers:
            stages.put_back()
        RandomState().load_state_dict(self._random)

    def _put_back_values(self) -> None:
        with torch.no_grad():
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
        for held in self._buffers:
            held.put_back()
        self._values.put_back()
        with torch.inference_mode():  # elsewhere they cannot be written
            self._inferred.put_back()
        for waiting in self._waiting:
            waiting()


def _await_gradients(scope: Scope) -> None:
    """Of backwards for which no host has waited, since they were not the last of an iteration.

    A failure in the attempt would abort their reductions as well, and what is put back be garbage.
    Without a device the host has waited for all of them; and a rank that is faster may have failed
    in this very attempt.

    Raises:
        PeerError: when they did not end, because a rank has failed already.
    """
    if not (any(context.finalization.is_busy for context in scope.contexts) and on_devices()):
        return
    groups = (group for context in scope.contexts for group in context.groups())
    if all(p.grad is None for p in scope.parameters()) and not any(
        group.gradients.waiting for group in groups
    ):
        return
    await_devices()
    alarm = current_alarm()
    if alarm.report is not None and not alarm.is_seen:
        raise alarm.because("an attempt cannot begin")


@dataclass(frozen=True)
class _Buffers:
    """Those that one module has, and which of them it saves."""

    module: nn.Module
    buffers: dict[str, Tensor | None]
    not_saved: set[str]

    @classmethod
    def of(cls, module: nn.Module) -> _Buffers:
        return cls(module, dict(module._buffers), set(module._non_persistent_buffers_set))

    def values(self) -> Iterator[Tensor]:
        """Those with values that a step may have written."""
        every = (b for b in self.buffers.values() if b is not None and not b.is_meta)
        return (b for b in every if may_be_written(b))

    def put_back(self) -> None:
        """Also those that were none, and no others."""
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)
        self.module._non_persistent_buffers_set = set(self.not_saved)
