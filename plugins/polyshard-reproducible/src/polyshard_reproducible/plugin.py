"""The plugin: its settings, and the slots of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import polyshard
from polyshard.description import identities_of
from polyshard.plugins.contract import Plugin, hookimpl
from polyshard.plugins.seams import GroupIdentity, GroupInfo
from polyshard_reproducible.checks import check_device, check_plans
from polyshard_reproducible.clock import NOBODY, Clock, Moment, Watcher
from polyshard_reproducible.codec import DTYPE, TreeReduce
from polyshard_reproducible.errors import ReproducibleError
from polyshard_reproducible.optimizers import OptimizerWatch
from polyshard_reproducible.randomness import kept_random_state, seed_of
from polyshard_reproducible.ranks import Position, groups_of, position_in
from polyshard_reproducible.shares import ReplicaGroups, Shares
from polyshard_reproducible.tree import NEUTRAL, is_power_of_two, sum_halves


@dataclass(frozen=True)
class _Served:
    """One group: the ranks that sum its gradients, and where this rank is among them.

    Nothing in it leads to the group's identity, which it is kept by for as long as that lives.
    """

    mesh: DeviceMesh
    device: torch.device
    codec: TreeReduce
    position: Position


@dataclass
class _Known:
    """What the plugin has learned of the groups that it serves."""

    groups: WeakKeyDictionary[GroupIdentity, _Served] = field(default_factory=WeakKeyDictionary)
    checked: WeakSet[GroupIdentity] = field(default_factory=WeakSet)
    """Groups of which plans were looked at."""
    clock: Clock = field(default_factory=Clock)
    watchers: WeakKeyDictionary[nn.Module, Watcher] = field(default_factory=WeakKeyDictionary)
    optimizers: OptimizerWatch = field(default_factory=OptimizerWatch)


@dataclass(frozen=True, eq=False)
class Reproducible(Plugin):
    """A plugin: weights, optimizer state and losses are the same bits at every world size.

    A step is ``slots`` micro-batches of one shape, which ranks share. Example::

        reproducible = Reproducible(slots=8)
        for block in model.layers:
            fully_shard(block, mesh=mesh, plugins=[reproducible])
        fully_shard(model, mesh=mesh, plugins=[reproducible])
        for step in range(steps):
            losses = []
            for slot in reproducible.each_slot(model, step=step):
                losses.append(loss_of(model, batch(sampler.indices(step, slot))))
                losses[-1].backward()
            loss = reproducible.mean(model, losses)
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    Attributes:
        slots: micro-batches of a step over all ranks: a power of two, a multiple of the ranks at
            every world size that is to give the same bits.
        seed: of random numbers in slots (dropout), which go by step and slot.

    Raises:
        ReproducibleError: for ``slots`` of which no binary tree can be made.
    """

    name = "reproducible"
    provides = ("reduce-codec",)
    conflicts_with = ("gather-codec", "gradient-landing")

    slots: int = 8
    seed: int = 0
    _known: _Known = field(default_factory=_Known, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse what is no tree."""
        given: dict[str, object] = {"slots": self.slots, "seed": self.seed}
        for name, value in given.items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise ReproducibleError(f"Reproducible: {name} must be a number, got {value!r}.")
        if not is_power_of_two(self.slots):
            raise ReproducibleError(
                f"Reproducible: slots must be a power of two, the leaves of a binary tree that is "
                f"the same for 1, 2, 4, ... ranks; got {self.slots}."
            )

    # What the engine asks ---------------------------------------------------------------------

    @hookimpl
    def polyshard_reduce_codec(self, group: GroupInfo) -> TreeReduce:
        """A tree for every group.

        Raises:
            ReproducibleError: where its sums could not be the same at every world size.
        """
        position = position_in(group)
        position.check(self.slots, f"the group of '{group.parameters[0].fqn}'")
        self._check(group)
        codec = TreeReduce(self.slots, self._known.clock)
        self._known.groups[group.identity] = _Served(group.mesh, group.device, codec, position)
        return codec

    @staticmethod
    def _check(group: GroupInfo) -> None:
        if group.reduce_dtype is not DTYPE:
            raise ReproducibleError(
                f"reproducible: gradients of '{group.parameters[0].fqn}' are reduced in "
                f"{group.reduce_dtype}; sums are made in {DTYPE}. Give "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32)."
            )

    # What the user asks -----------------------------------------------------------------------

    def each_slot(
        self, model: nn.Module, *, step: int, replicas: ReplicaGroups | None = None
    ) -> Iterator[int]:
        """Run one step: the slots of this rank, one after another, each with its random numbers.

        The body of the loop is one forward and one backward of ``model``, the outermost sharded
        module, on a batch of the slot. Losses are not scaled: gradients are means over all slots.
        Every rank runs all of its slots before the optimizer steps.

        Args:
            model: sharded with this plugin.
            step: its number, which random numbers go by.
            replicas: groups of ranks, this one included, that share the slots of this step; how
                many there are may be another number in the next step.

        Raises:
            ReproducibleError: for a model that was not, or not all of it; for what else takes part
                in its sums; for gradients that some slots have and others have not.
        """
        served = self._served_of(model)
        first = served[0]
        check_device(first.device)
        self._known.optimizers.add(model)
        shares, position = self._shares(replicas, first)
        turns, run = position.turns(self.slots), object()
        watcher = self._known.watchers.get(model, NOBODY)
        if shares is not None and watcher is not NOBODY:
            raise ReproducibleError(
                "reproducible: what replica groups share cannot be recorded. Record a run of one "
                "group, whose bits are the same."
            )
        with kept_random_state(first.device), self._timed(model, watcher):
            watcher.on_step(step)
            for turn in range(turns):
                now = self._known.clock.now = Moment(run, step, turn, turns, shares)
                _tell(model, is_last=now.is_last)
                slot = position.slot(turn, self.slots)
                torch.manual_seed(seed_of(self.seed, step, slot))
                watcher.on_slot(slot)
                yield slot
                if self._known.clock.now is not now:
                    raise ReproducibleError(
                        "reproducible: another step began before this one had ended; run the "
                        "slots of one step after another."
                    )
            for each in served:
                if each.codec.bound is not None:
                    each.codec.bound.check_ended(now)
            watcher.on_sums()

    @contextmanager
    def _timed(self, model: nn.Module, watcher: Watcher) -> Iterator[None]:
        """Before the first slot and after the last there is none."""
        clock = self._known.clock
        clock.now = None
        try:
            yield
        finally:
            clock.now = None
            watcher.on_pause()
            _tell(model, is_last=True)

    def _shares(
        self, replicas: ReplicaGroups | None, first: _Served
    ) -> tuple[Shares | None, Position]:
        """Which ranks have the other slots, and which slots this rank has."""
        if replicas is None:
            return None, first.position
        shares = Shares.of(replicas, self.slots, first.position)
        shares.check()
        return shares, shares.position(first.position)

    def mean(
        self, model: nn.Module, losses: Sequence[Tensor], *, replicas: ReplicaGroups | None = None
    ) -> Tensor:
        """The mean over all slots of what each gave, in the order of the tree.

        Args:
            model: as of :meth:`each_slot`.
            losses: one of each slot of this rank, in order: tensors of one shape.
            replicas: as of :meth:`each_slot`.

        Returns:
            The same bits on every rank and at every world size; nothing that autograd follows.

        Raises:
            ReproducibleError: for another number of losses than this rank has slots.
        """
        first = self._served_of(model)[0]
        shares, position = self._shares(replicas, first)
        turns = position.turns(self.slots)
        if len(losses) != turns:
            raise ReproducibleError(
                f"reproducible: mean() takes one loss of each slot of this rank, {turns}; got "
                f"{len(losses)}."
            )
        with torch.no_grad():
            own = torch.stack([loss.detach().float() for loss in losses])
            every = own.new_full((self.slots, *own.shape[1:]), NEUTRAL)
            every[[position.slot(turn, self.slots) for turn in range(turns)]] = own
            for group in groups_of(first.mesh):
                dist.all_reduce(every, group=group)
            if shares is not None:
                shares.gather_(every)
            return sum_halves(every.movedim(0, -1).contiguous()) / self.slots

    def watch(self, model: nn.Module, watcher: Watcher) -> tuple[Position, DeviceMesh]:
        """Have ``watcher`` told of every step of ``model``; the last one that was given is.

        Returns:
            Where this rank is among those that share the slots, and on which mesh.

        Raises:
            ReproducibleError: as :meth:`each_slot`.
        """
        served = self._served_of(model)
        self._known.watchers[model] = watcher
        return served[0].position, served[0].mesh

    def _served_of(self, model: nn.Module) -> list[_Served]:
        own = identities_of(model)
        if not self._known.checked.issuperset(own):
            check_plans(polyshard.describe(model).groups, TreeReduce.name)  # makes all plans
            self._known.checked.update(own)
        served = [s for identity, s in self._known.groups.items() if identity in own]
        if len(served) != len(own) or not served:
            raise ReproducibleError(
                f"reproducible: {len(own) - len(served)} of the {len(own)} groups of this model "
                "were not given this plugin; pass the same object to every fully_shard(plugins=)."
            )
        positions = {s.position for s in served}
        if len(positions) > 1:
            raise ReproducibleError(
                "reproducible: groups of this model live on different meshes, so that their slots "
                "would be different ones. Shard all of them over one mesh."
            )
        return served


def _tell(model: Any, *, is_last: bool) -> None:
    """Only whole sums are added over replicas, and shown to who waits for the last backward."""
    model.set_is_last_backward(is_last)
    model.set_requires_all_reduce(is_last)
