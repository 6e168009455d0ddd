"""Memory of one rank in each phase of a step, part by part, as the engine takes and frees it.

[Note: memory of a step]
At rest a rank holds shards, optimizer state and, from the second step on, memory for sharded
gradients, which the engine keeps. In forward come the unsharded parameters of the root, of the unit
that runs and of the next one, which is gathered meanwhile, and the activations of all units so far.
Backward goes the other way: a unit that is done is freed, and then its gradients are packed, beside
what they are packed in; what is sent lives on while the next unit runs. What a gather or a
reduction takes and frees, its program says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from polyshard_cli.plan.dry_run.planning import PlannedGroup
from polyshard_cli.plan.dry_run.probing import Cost, Probe
from polyshard_cli.plan.estimate.traffic import accumulated_bytes
from polyshard_cli.plan.request.settings import OptimizerName

STATES: dict[OptimizerName, int] = {"adamw": 2, "momentum": 1, "sgd": 0}
"""Values of optimizer state for each element of a trainable parameter."""


PARTS = ("parameters", "gradients", "optimizer", "unsharded", "activations", "transfers")
"""Of a phase, as its fields are called."""

Moment = tuple[str, int, int, int]
"""The unit that runs, and bytes: unsharded parameters, activations, transfers."""


@dataclass(frozen=True)
class Phase:
    """The moment of a phase at which a rank's device holds most, in bytes."""

    name: str
    at: str
    """The unit that runs; empty for the root, and between phases."""
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    unsharded: int = 0
    activations: int = 0
    transfers: int = 0
    """What is packed, encoded or in flight, and unsharded gradients that wait for it."""

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(getattr(self, part) for part in PARTS)


@dataclass(frozen=True)
class Memory:
    """Of one rank: its device in each phase, and what rests on other tiers."""

    phases: tuple[Phase, ...]
    tiers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Bytes by tier (``host``, ``disk``) and part."""

    @property
    def peak(self) -> Phase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.total)


def memory_of(
    groups: Sequence[PlannedGroup],
    found: Probe,
    optimizer: OptimizerName,
    tiers: Mapping[str, Any],
    micro_batches: int = 1,
) -> Memory:
    """Memory of a step of ``groups``, whose units cost what ``found`` says.

    Args:
        groups: the root's first, then units in the order of their forwards.
        found: costs of units; without any, activations count as nothing.
        optimizer: whose state is counted.
        tiers: where parameters, gradients and optimizer state rest (``device``, ``host``,
            ``disk``), and what ``fraction`` of the state does.
        micro_batches: of a step; the gradients of all but the last wait unsharded.
    """
    return _Step(groups, found, optimizer, tiers).memory(micro_batches)


class _Step:
    """One step, unit by unit."""

    def __init__(
        self,
        groups: Sequence[PlannedGroup],
        found: Probe,
        optimizer: OptimizerName,
        tiers: Mapping[str, Any],
    ) -> None:
        self._found, self._tiers = found, tiers
        self._makes_roots = optimizer == "adamw"
        self._groups = groups
        self._units: dict[str, list[PlannedGroup]] = {}
        for group in groups:
            self._units.setdefault(group.unit, []).append(group)
        self._names = [name for name in found.units if name in self._units]
        self._names = self._names or [name for name in self._units if name]
        trainable = [group for group in groups if any(p.trainable for p in group.parameters)]
        self._parts = {
            "parameters": sum(group.plan.shard_bytes for group in groups),
            "gradients": sum(group.plan.shard_bytes for group in trainable),
            "optimizer": STATES[optimizer] * trainable_bytes(groups),
        }

    def memory(self, micro_batches: int) -> Memory:
        away: dict[str, dict[str, int]] = {}
        resting: dict[str, int] = {}
        shares = (("params", 1), ("grads", 1), ("optimizer", self._tiers["fraction"]))
        for (key, share), (part, nbytes) in zip(shares, self._parts.items(), strict=True):
            moved = 0 if self._tiers[key] == "device" else nbytes * share
            resting[part] = round(nbytes - moved)
            if moved or (key != "optimizer" and self._tiers[key] != "device"):
                away.setdefault(self._tiers[key], {})[part] = round(moved)
        # The first backward, one in the middle (others are like it), and the last.
        turns = min(micro_batches, 3)
        backwards = (
            moment
            for turn in range(turns)
            for moment in self._backward(is_first=turn == 0, is_last=turn + 1 == turns)
        )
        # torch's foreach AdamW makes roots of one of its two states, of what has state here.
        stepping = ("", 0, 0, resting["optimizer"] // 2 if self._makes_roots else 0)
        moments: dict[str, Iterable[Moment]] = {
            "at rest": [("", 0, 0, 0)],
            "forward": self._forward(is_first=micro_batches == 1),
            "backward": backwards,
            "optimizer": [stepping],
        }
        kept = sum(group.plan.gather_kept_bytes for group in self._groups)
        phases = []
        for name, found in moments.items():
            at, unsharded, activations, transfers = max(found, key=lambda m: sum(m[1:]))
            held = {"unsharded": unsharded, "activations": activations}
            phases.append(Phase(name, at, **resting, **held, transfers=transfers + kept))
        return Memory(tuple(phases), away)

    def _forward(self, *, is_first: bool) -> Iterator[Moment]:
        """From the second micro-batch on beside the gradients of those before."""
        held, kept = self._unsharded([""]), 0
        sums = 0 if is_first else self._waiting(["", *self._names])
        for index, name in enumerate(self._names):
            cost = self._cost(name)
            following = self._names[index + 1 : index + 2]
            unsharded = held + self._unsharded([name, *following])
            activations = kept + cost.input_bytes + cost.forward.peak_bytes
            yield name, unsharded, activations, sums + self._arriving(following)
            kept += cost.saved_bytes
            held += self._kept_of(name)
        activations = kept + self._found.root.forward.peak_bytes
        yield "", held, activations, sums + self._arriving([""])

    def _backward(self, *, is_first: bool, is_last: bool) -> Iterator[Moment]:
        """Gradients are added to those of micro-batches before, and leave in the last one."""
        costs = [self._cost(name) for name in self._names]
        root = self._found.root
        kept = sum(cost.saved_bytes for cost in costs)
        held = self._unsharded([""]) + sum(map(self._kept_of, self._names))
        held -= self._slices(self._names[-1:])
        last = [name for name in self._names[-1:] if not self._stays(name)]
        activations = kept + root.saved_bytes + root.backward.peak_bytes
        sums = 0 if is_first else self._waiting(["", *self._names])
        yield "", held + self._unsharded(last), activations, sums + self._returning(last)
        waiting = self._found.tail_gradient_bytes
        leaving = 0
        for index in reversed(range(len(self._names))):
            name, cost = self._names[index], costs[index]
            here, ahead = self._gathered(index, index + 1), self._gathered(index - 1, index)
            unsharded = held + self._unsharded([*ahead, *here])
            transfers = sums + waiting + leaving + self._returning(ahead)
            # The next gather is on its way before this unit's is waited for.
            yield name, unsharded, kept, transfers + self._returning(here)
            yield name, unsharded, kept + cost.backward.peak_bytes, transfers
            kept -= cost.saved_bytes
            if self._stays(name):
                held -= self._kept_of(name)
            # What is summed is what is sent in the end, and what autograd made in the beginning.
            sums += (is_first - is_last) * self._waiting([name])
            leaving = self._leaving(name) if is_last else 0
            packed = _packed(self._of([name])) if is_last else 0
            # Freed, and packed for its reduction; meanwhile the next gather has started.
            ahead = self._gathered(index - 2, index)
            packing = sums + waiting + leaving + packed + self._returning(ahead[:1])
            held -= self._slices(self._names[max(index - 1, 0) : index])
            yield name, held + self._unsharded(ahead), kept, packing
        yield "", held, 0, sums + leaving + _gradients(self._of([""]))
        sums += (is_first - is_last) * self._waiting([""])
        yield "", held, 0, sums + leaving + (self._leaving("") if is_last else 0)

    def _cost(self, name: str) -> Cost:
        return self._found.units.get(name, Cost())

    def _of(self, names: Sequence[str]) -> list[PlannedGroup]:
        return [group for name in names for group in self._units.get(name, [])]

    def _unsharded(self, names: Sequence[str]) -> int:
        """Unsharded parameters; nothing where one rank computes with its shard itself."""
        return sum(group.plan.gather.kept_bytes for group in self._of(names))

    def _waiting(self, names: Sequence[str]) -> int:
        """Unsharded gradients of earlier micro-batches."""
        return sum(accumulated_bytes(group.plan) for group in self._of(names))

    def _stays(self, name: str) -> bool:
        """Whether a unit stays gathered between forward and backward."""
        return self._units[name][0].plan.reshard_after_forward is False

    def _gathered(self, first: int, last: int) -> list[str]:
        """Those of the units ``first`` to ``last`` (excluded) that backward gathers again."""
        return [name for name in self._names[max(first, 0) : last] if not self._stays(name)]

    def _kept_of(self, name: str) -> int:
        """Bytes of a unit between forward and backward: all, a block's slice, or none."""
        if self._stays(name):
            return self._unsharded([name])
        groups = [g.plan for g in self._units[name] if g.plan.regather is not g.plan.gather]
        return sum(op.frees for plan in groups for op in plan.regather.ops)

    def _slices(self, names: Sequence[str]) -> int:
        """What blocks keep of units, given up once those are gathered again."""
        return sum(self._kept_of(name) for name in names if not self._stays(name))

    def _returning(self, names: Sequence[str]) -> int:
        """Scratch of a gather in backward; blocks send slices to where they belong."""
        return self._arriving([name for name in names if not self._slices([name])])

    def _arriving(self, names: Sequence[str]) -> int:
        """Scratch of a gather, and shards on their way from another tier."""
        plans, is_away = [g.plan for g in self._of(names)], self._tiers["params"] != "device"
        return sum(plan.gather.scratch_bytes + is_away * plan.shard_bytes for plan in plans)

    def _leaving(self, name: str) -> int:
        """What gradients on their way are packed and summed in, and those sent as they are."""
        groups = [group for group in self._of([name]) if group.trainable_elements]
        return sum(_gradients([g]) - _packed([g]) + g.plan.reduction.scratch_bytes for g in groups)


def trainable_bytes(groups: Sequence[PlannedGroup]) -> int:
    """Of a rank's shards of trainable parameters, without padding."""
    return sum(g.trainable_elements * g.plan.dtypes.orig.itemsize for g in groups)


def _gradients(groups: Sequence[PlannedGroup], *, only_packed: bool = False) -> int:
    """Unsharded gradients; or those that are copied before they are sent, and freed then."""
    return sum(
        placed.numel * group.plan.dtypes.param.itemsize
        for group in groups
        for placed, said in zip(group.plan.layout.parameters, group.parameters, strict=True)
        if said.trainable
        and (placed.staged or not only_packed or group.plan.payloads.reduce is not None)
    )


_packed = partial(_gradients, only_packed=True)
