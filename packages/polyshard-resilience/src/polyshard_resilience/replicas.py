"""Replica groups that are killed and come back: what torchft's ``Manager`` needs of a model.

[Note: replica groups]
Each group of ranks has a whole copy of the model, sharded among its ranks. Rank ``r`` of a group
has peers: the ranks ``r`` of the other groups, which have the same shards. So a rank's own part is
all that it sends, sums and heals from, and no rank of its group is asked for anything.

Weights and optimizer state change when a step is committed and at no other time. A quorum comes
before the step, and a rank that heals has its peer's state before its first forward. So a peer may
read shards where they rest until the vote at the end of the step, which waits for it; what forward
and backward change (buffers, state of plugins) is copied while the step has not begun.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from polyshard.engine.keeping import load_plugin_state_dict, plugin_state_dict
from polyshard.engine.root import groups_of, preview_names, units_below
from polyshard.errors import CheckpointError, LifecycleError, SettingError, UnsupportedError
from polyshard.params.parameter import ShardedParameter
from polyshard.plugins.seams import Stateful, local_of
from polyshard_resilience.rollback.optimizers import Undoable
from polyshard_resilience.rollback.undo import Scope, Undo

PARAMS = "params"


class Work(Protocol):
    """A sum under way."""

    def wait(self) -> bool:
        """Wait until it is there, or is known to fail, which only the manager tells."""
        ...


class Manager(Protocol):
    """What is used of ``torchft.Manager``, which documents it."""

    def register_state_dict_fn(
        self,
        key: str,
        load_state_dict: Callable[[Any], None],
        state_dict: Callable[[], Any],
    ) -> None:
        """See torchft."""
        ...

    def start_quorum(self) -> None:
        """See torchft."""
        ...

    def allreduce(self, tensor: Tensor, *, reduce_op: Any) -> Work:
        """See torchft."""
        ...

    def should_commit(self) -> bool:
        """See torchft."""
        ...

    def current_step(self) -> int:
        """See torchft."""
        ...

    def num_participants(self) -> int:
        """See torchft."""
        ...

    def participating_rank(self) -> int | None:
        """See torchft."""
        ...


class Replicas:
    """One replica group under torchft: its ranks sum with others, heal, and commit steps.

    Gradients are averaged over the groups that take part, after the reduction within the group.
    A group that comes back takes weights, optimizer state, buffers and state of plugins from
    another, each rank from its peer. Make it on every rank, once the model is sharded::

        manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(), load_state_dict=None, state_dict=None,
            min_replica_size=1, use_async_quorum=False,
        )
        replicas = Replicas(manager, model, optimizer)
        while manager.current_step() < steps:
            with replicas.step() as step:
                loss_of(model, batch(step.number, step.rank, step.size)).backward()
            if step.committed:
                scheduler.step()

    Args:
        manager: of torchft, with ``use_async_quorum=False`` and no state of its own.
        model: the outermost sharded module.
        optimizers: all that step it; the step does that.
        also: other state that a group takes over when it heals: a scheduler.

    Raises:
        SettingError: for another kind of manager, or a hook that gradients have already.
        UnsupportedError: for state that a peer cannot read, and gradients that are not summed.
    """

    def __init__(
        self,
        manager: Manager,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer] = (),
        *,
        also: Sequence[Stateful] = (),
    ) -> None:
        self._manager = manager
        self._scope = Scope.of("Replicas", model, optimizers, also)
        if getattr(manager, "_use_async_quorum", False):
            raise SettingError(
                "Replicas: pass use_async_quorum=False to torchft's Manager. A group that heals "
                "during its forward would compute with weights that are none of the step's."
            )
        self._check()
        self._step: ReplicaStep | None = None
        self._stepped: torch.Event | None = None
        for index, group in enumerate(groups_of(model)):
            if group.reduce_settings.hook is not None:
                raise SettingError(
                    f"Replicas: group '{group.name}' has a hook of set_all_reduce_hook(), where "
                    "sums over replicas are made. Remove it."
                )
            hook = partial(self._sum, index)
            group.reduce_settings = replace(group.reduce_settings, hook=hook)
        manager.register_state_dict_fn("polyshard", self.load_state_dict, self.state_dict)

    def step(self) -> ReplicaStep:
        """One step: forward, backward and clipping go into the block; its end commits or undoes.

        On entry the groups that are there agree on who takes part, and a group that is behind
        heals. At the end the optimizers step and drop gradients if all sums of all of the group's
        ranks succeeded. Otherwise nothing of the step is left: buffers, random numbers and state
        of plugins are what they were, and the same step is to be made again.
        """
        self._step = ReplicaStep(self._manager, self._scope, self._begin, self._expected)
        return self._step

    # Sums -------------------------------------------------------------------------------------

    def _sum(self, index: int, total: Tensor) -> None:
        """The hook of a group; ``total`` is averaged over the ranks of this replica group."""
        if self._step is None or self._step.committed is not None:
            raise LifecycleError(
                "Replicas: a backward outside of `with replicas.step():` has no other groups to "
                "sum with. Put forward and backward into the block."
            )
        self._step.sum(index, total)

    def _expected(self) -> dict[int, str]:
        """Groups that are trained, by number."""
        every = enumerate(groups_of(self._scope.model))
        return {index: group.name for index, group in every if group.is_trained}

    # State ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Before a quorum: weights rest, and another stream may wait for the last step."""
        for _, _, unit in units_below(self._scope.model):
            unit.reshard()
        if torch.accelerator.is_available():
            self._stepped = torch.accelerator.current_stream().record_event()

    def state_dict(self) -> dict[str, Any]:
        """What this rank's peers heal from; any thread may call it while a step begins.

        Shards and optimizer state are live: they do not change until the step is committed.

        Returns:
            Tensors of this rank's parts, in plain containers and without ``DTensor``.
        """
        if self._stepped is not None:
            torch.accelerator.current_stream().wait_event(self._stepped)
        model, parts = self._scope.model, self._parts()
        return {
            "form": [_form(name, part) for name, part in parts.items()],
            "parameters": {name: local_of(p.parameter).detach() for name, p in parts.items()},
            "whole": {name: local_of(t).detach() for name, t in self._whole().items()},
            "buffers": {name: b.detach().clone() for name, b in model.named_buffers()},
            "optimizers": [_optimizer_state(o) for o in self._scope.optimizers],
            "plugins": copy.deepcopy(
                {_beyond_rank(key): value for key, value in plugin_state_dict(model).items()}
            ),
            "also": [copy.deepcopy(state.state_dict()) for state in self._scope.also],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what a peer's :meth:`state_dict` returned.

        Raises:
            CheckpointError: naming what the peer has otherwise; nothing is loaded then.
        """
        own = self.state_dict()
        _compare(own, state_dict)
        for kind in ("parameters", "whole"):
            for name, tensor in own[kind].items():
                tensor.copy_(state_dict[kind][name])
        for name, buffer in self._scope.model.named_buffers():
            buffer.copy_(state_dict["buffers"][name])
        sharded = {id(p.parameter): p for p in self._parts().values()}
        for optimizer, saved in zip(self._scope.optimizers, state_dict["optimizers"], strict=True):
            _load_optimizer(optimizer, saved, sharded)
        plugins = {
            key: state_dict["plugins"][_beyond_rank(key)]
            for key in plugin_state_dict(self._scope.model)
        }
        load_plugin_state_dict(self._scope.model, plugins)
        for state, values in zip(self._scope.also, state_dict["also"], strict=True):
            state.load_state_dict(values)

    def _parts(self) -> dict[str, ShardedParameter]:
        """Sharded parameters by name, in the order of the groups."""
        preview_names(self._scope.model)
        groups = groups_of(self._scope.model)
        return {p.current_info.fqn: p for group in groups for p in group.shards.parameters}

    def _whole(self) -> dict[str, nn.Parameter]:
        """Parameters that no group holds, by name."""
        sharded = {id(p.parameter) for p in self._parts().values()}
        every = self._scope.model.named_parameters()
        return {name: p for name, p in every if id(p) not in sharded}

    def _check(self) -> None:
        """Refuse what cannot take part.

        Raises:
            UnsupportedError: naming it.
        """
        for name, parameter in self._whole().items():
            if parameter.requires_grad:
                raise UnsupportedError(
                    f"Replicas: '{name}' is trained and not sharded (ignored_params), so that no "
                    "sum over replicas reaches its gradient. Shard it, or freeze it."
                )
        for optimizer in self._scope.optimizers:
            if isinstance(optimizer, Undoable):
                raise UnsupportedError(
                    f"Replicas: {type(optimizer).__name__} keeps state outside of optimizer.state "
                    "(offloaded, or on owners of whole matrices), which a peer cannot read. Use "
                    "the optimizer without that plugin."
                )
        for group in groups_of(self._scope.model):
            if group.shards.layout.owners:
                raise UnsupportedError(
                    f"Replicas: gradients of group '{group.name}' land whole on owners, where no "
                    "sum over replicas reaches them. Have them land on shards."
                )


@dataclass(frozen=True)
class SharedSlots:
    """The groups that take part in a step, as polyshard-reproducible asks for them.

    Attributes:
        rank: the number of this group among them.
        size: how many they are.
    """

    _manager: Manager
    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum ``tensor`` over this rank and its peers, in place; wrong if the step then fails."""
        self._manager.allreduce(tensor, reduce_op=ReduceOp.SUM).wait()


@dataclass
class ReplicaStep:
    """A block of :meth:`Replicas.step`.

    Attributes:
        committed: whether the optimizers stepped; ``None`` until the block has ended.
        number: how many steps were committed before this one; for data and random numbers.
        size: how many replica groups take part; 0 before the block.
    """

    _manager: Manager
    _scope: Scope
    _begin: Callable[[], None]
    _expected: Callable[[], Mapping[int, str]]
    committed: bool | None = None
    number: int = 0
    size: int = 0
    _summed: set[int] = field(default_factory=set)
    _is_shared: bool = False

    @property
    def rank(self) -> int:
        """The number of this group among them.

        Raises:
            UnsupportedError: for a spare group, which has none (``FIXED_WITH_SPARES``).
        """
        found = self._manager.participating_rank()
        if found is None:
            raise UnsupportedError(
                "Replicas: this group is a spare without a number of its own. Use "
                "WorldSizeMode.DYNAMIC, torchft's default."
            )
        return found

    @property
    def shared_slots(self) -> SharedSlots:
        """What ``Reproducible.each_slot(replicas=)`` of polyshard-reproducible takes.

        Its sums over replicas are those of this step then, instead of averages.
        """
        self._is_shared = True
        return SharedSlots(self._manager, self.rank, self.size)

    def sum(self, index: int, total: Tensor) -> None:
        """Average ``total``, of group ``index``, over replicas, unless slots are shared."""
        self._summed.add(index)
        if not self._is_shared:
            self._manager.allreduce(total, reduce_op=ReduceOp.AVG).wait()

    def __enter__(self) -> ReplicaStep:
        """Agree on who takes part, and heal."""
        if self.committed is not None:
            raise LifecycleError("a step of Replicas is entered once; call step() for the next.")
        self._begin()
        self._manager.start_quorum()
        self.number = self._manager.current_step()
        self.size = self._manager.num_participants()
        self._undo = Undo(self._scope)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Commit the step, or undo it.

        Raises:
            LifecycleError: for groups without a gradient, which others may wait for.
        """
        del kind, trace
        self.committed = False
        if error is not None:
            self._undo.put_back()
            return
        missing = [n for i, n in self._expected().items() if i not in self._summed]
        if missing:
            self._undo.put_back()
            raise LifecycleError(
                f"Replicas: groups {missing} had no gradient in this step, and other replica "
                "groups may wait to sum theirs. Use all units in every step, with "
                "set_reduce_scatter_unused_params(True) where parameters may go unused, or freeze "
                "them."
            )
        try:
            commits = self._manager.should_commit()
        except BaseException:
            self._undo.put_back()
            raise
        if not commits:
            self._undo.put_back()
            return
        for optimizer in self._scope.optimizers:
            optimizer.step()
        for optimizer in self._scope.optimizers:
            optimizer.zero_grad()
        self.committed = True


def _form(name: str, part: ShardedParameter) -> str:
    """What all ranks of all groups must have alike."""
    parameter = part.parameter
    ranks = part.info.mesh.size()
    return f"'{name}' {tuple(parameter.shape)} {parameter.dtype} on {ranks} ranks"


def _beyond_rank(key: str) -> str:
    """A key of plugin state without its rank, which a peer may have another of."""
    return key.partition(".")[2]


def _optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Settings of each group, and the state of each parameter in their order."""
    groups = optimizer.param_groups
    return {
        "settings": [_settings(group) for group in groups],
        "states": [_state(optimizer.state.get(p)) for group in groups for p in group[PARAMS]],
    }


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != PARAMS}


def _state(state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Parts of tensors sharded like the parameter, and other values; transports move all to CPU."""
    if state is None:
        return None
    parts = {n: local_of(v) for n, v in state.items() if isinstance(v, DTensor)}
    others = {n: copy.deepcopy(v) for n, v in state.items() if n not in parts}
    tensors = {n: v for n, v in others.items() if isinstance(v, Tensor)}
    on_device = [n for n, v in tensors.items() if v.device.type != "cpu"]
    return {"parts": parts, "others": others, "on_device": on_device}


def _load_optimizer(
    optimizer: Optimizer, saved: Mapping[str, Any], sharded: Mapping[int, ShardedParameter]
) -> None:
    for group, settings in zip(optimizer.param_groups, saved["settings"], strict=True):
        group.update(settings)
    parameters = [p for group in optimizer.param_groups for p in group[PARAMS]]
    for parameter, state in zip(parameters, saved["states"], strict=True):
        if state is None:
            optimizer.state.pop(parameter, None)
            continue
        held = optimizer.state[parameter] = {}
        device = local_of(parameter).device
        for name, value in state["others"].items():
            held[name] = value.to(device) if name in state["on_device"] else value
        for name, part in state["parts"].items():
            held[name] = sharded[id(parameter)].wrap(part.to(device, copy=True))


def _compare(own: Mapping[str, Any], peer: Mapping[str, Any]) -> None:
    """Refuse a peer's state that does not fit.

    Raises:
        CheckpointError: naming the first difference.
    """
    for one, other in zip(_lines(own), _lines(peer), strict=False):
        if one != other:
            break
    else:
        if sum(1 for _ in _lines(own)) == sum(1 for _ in _lines(peer)):
            return
        one, other = "less or more of it", "another number of entries"
    raise CheckpointError(
        f"Replicas: this rank has {one}, and the rank that it heals from has {other}. All replica "
        "groups need the same model, optimizers, plugins and number of ranks."
    )


def _lines(state: Mapping[str, Any]) -> Iterator[str]:
    yield from state["form"]
    for kind in ("whole", "buffers"):
        for name, tensor in state[kind].items():
            yield f"{kind} '{name}' {tuple(tensor.shape)} {tensor.dtype}"
    for index, optimizer in enumerate(state["optimizers"]):
        groups = [sorted(settings) for settings in optimizer["settings"]]
        yield f"optimizer {index} of {len(optimizer['states'])} parameters with settings {groups}"
    yield from (f"plugin state '{key}'" for key in state["plugins"])
    yield f"{len(state['also'])} states in also="
