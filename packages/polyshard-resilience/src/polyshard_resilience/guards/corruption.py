"""Memory that holds what was written: weights and optimizer state, at rest and on replicas.

[Note: windows]
Weights and optimizer state change in the optimizer's step and rest until its next one, so a digest
after a step has to hold before the next. That is a *window*; one opens after the first step and
after every ``every``-th from then on. What changes within a window is found when it closes, before
the step uses it. A change between windows becomes part of the weights; a replica that differs stays
different, and is found at the end of the next window. Parameters that no optimizer has never
change: their window stays open.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from polyshard.engine.every_step import after_every_step
from polyshard.engine.root import units_below
from polyshard.errors import SettingError
from polyshard_resilience.errors import CorruptionError
from polyshard_resilience.guards.names import (
    check_optimizer,
    check_steps_alone,
    listed,
    names_of,
    parameters_of,
)
from polyshard_resilience.guards.peers import (
    Peers,
    are_same,
    axes_of,
    gathered,
    meshes_of,
    ranks_in_words,
    this_rank,
)
from polyshard_resilience.guards.watch import WEIGHTS, Look, Seen, Watched, watched_of

KINDS = ("weights", "optimizer state")


def replicated_over(parameters: Sequence[Tensor]) -> dict[dist.ProcessGroup, list[int]]:
    """For each process group, which parameters its ranks hold alike."""
    found: dict[dist.ProcessGroup, list[int]] = {}
    for index, parameter in enumerate(parameters):
        for mesh, axis in axes_of(parameter):
            assert isinstance(parameter, DTensor)
            if parameter.placements[axis].is_replicate():
                found.setdefault(mesh.get_group(axis), []).append(index)
    return found


def differing(
    look: Look, parameters: Sequence[Tensor], names: Sequence[str], device: torch.device
) -> Iterator[str]:
    """What replicas do not hold alike, in words; the same on all ranks of a process group."""
    shared = replicated_over(parameters)
    if not shared:
        return
    numbers = look.summaries(len(parameters))
    for group, indices in shared.items():
        own = torch.stack([n.to(device) for index in indices for n in numbers[index]])
        extremes = torch.cat([own, ~own])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        largest, smallest = extremes[: own.numel()], ~extremes[own.numel() :]
        wrong = (largest != smallest).nonzero().flatten().tolist()
        if not wrong:
            continue
        every = gathered([int(own[place]) for place in wrong], group)
        for row, place in enumerate(wrong):
            index, kind = divmod(place, len(KINDS))
            yield _told(names[indices[index]], KINDS[kind], [each[row] for each in every], group)


def _told(name: str, kind: str, numbers: list[int], group: dist.ProcessGroup) -> str:
    """Which ranks hold which of several values: the fewest are most likely the wrong ones."""
    ranks = dist.get_process_group_ranks(group)
    kinds = [[r for r, n in zip(ranks, numbers, strict=True) if n == k] for k in {*numbers}]
    sides = " and ".join(ranks_in_words(side) for side in sorted(kinds, key=lambda k: (len(k), k)))
    return f"replicas of '{name}' ({kind}): {sides} differ"


EVERY = 32


class Corruption:
    """Finds bits that flip in weights and optimizer state at rest, and replicas that diverge.

    See [Note: windows]. Everything is found by digests of each rank's memory; ranks send two
    numbers a replicated parameter, and a verdict, at the end of a window. The guard lasts as long
    as the optimizers.

    Writes of yours between two steps are no corruption: ``load_state_dict`` of model and optimizers
    is seen, and so is whatever torch counts as a write (``copy_`` and other operations in place on
    a parameter). What it does not count, writes through ``.data`` and ``torch._foreach_*``, has to
    be said with :meth:`rebase`.
    """

    def __init__(
        self,
        model: nn.Module,
        *optimizers: Optimizer,
        every: int = EVERY,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Watch from the next step on.

        Args:
            model: gives parameters their names. Those that no optimizer has are watched too.
            optimizers: all that step the model's parameters.
            every: steps from one window to the next; 1 leaves no gap.
            group: of the ranks that decide together, where they are not those of the parameters'
                meshes.

        Raises:
            SettingError: for anything else.
        """
        for optimizer in optimizers:
            check_optimizer(optimizer, "guards.Corruption")
            check_steps_alone(optimizer, "guards.Corruption")
        if not optimizers:
            raise SettingError("guards.Corruption takes the optimizers that step the model.")
        if every < 1:
            raise SettingError(f"every={every}: it is at least 1 step.")
        self._model = weakref.ref(model)
        self._every = every
        self._group = group
        self._is_on = True
        self._windows = [Window(optimizer) for optimizer in optimizers]
        self._resting: Look | None = None
        self._listen(model, optimizers)

    def _listen(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """Hooks hold the guard; it holds neither the model nor the optimizers."""
        for module in model.modules():
            module.register_load_state_dict_post_hook(self._after_loading)
        for window, optimizer in zip(self._windows, optimizers, strict=True):
            optimizer.register_step_pre_hook(_Call(self._before_step, window))
            optimizer.register_step_post_hook(_Call(self._after_step, window))
            optimizer.register_load_state_dict_post_hook(self._after_loading_state)
        after_every_step(self, Corruption._after_another)

    def remove(self) -> None:
        """Watch no longer."""
        self._is_on = False
        self._resting = None
        for window in self._windows:
            window.close()

    def rebase(self) -> None:
        """Accept the current weights and state: call it after writes that torch does not count.

        It also lets training continue after a ``CorruptionError`` without loading a checkpoint. It
        reads the tensors of open windows, and does not communicate.
        """
        self._resting = self._look_at_rest()
        for window in self._windows:
            window.retake()

    def check(self) -> None:
        """Look now, on all ranks, between two steps; windows that are open stay so.

        Raises:
            CorruptionError: on every rank alike, naming what changed or differs.
        """
        for window in self._windows:
            optimizer = window.optimizer
            if optimizer is not None:
                self._close(window, optimizer, stays_open=True)

    # --- hooks --------------------------------------------------------------------------------

    def _before_step(self, window: Window, optimizer: Optimizer) -> None:
        if not self._is_on:
            return
        check_steps_alone(optimizer, "guards.Corruption")
        window.follow(meshes_of(parameters_of(optimizer)))
        if window.is_open:
            self._close(window, optimizer)

    def _after_step(self, window: Window, optimizer: Optimizer) -> None:
        if self._is_on:
            if window.steps % self._every == 0:
                window.open(optimizer)
                self._resting = self._resting or self._look_at_rest()
            window.steps += 1

    def _after_loading(self, module: nn.Module, incompatible: object) -> None:
        del incompatible
        self._forget(weights=[p for p in module._parameters.values() if p is not None])

    def _after_loading_state(self, optimizer: Optimizer) -> None:
        self._forget(state=parameters_of(optimizer))

    def _after_another(self, optimizer: Optimizer) -> None:
        """An optimizer that the guard does not know stepped, perhaps some of its parameters."""
        if all(window.optimizer is not optimizer for window in self._windows):
            self._forget(weights=parameters_of(optimizer))

    def _forget(self, weights: Sequence[Tensor] = (), state: Sequence[Tensor] = ()) -> None:
        for look in (self._resting, *(window.look for window in self._windows)):
            if look is not None:
                look.forget(weights, weights=True, state=False)
                look.forget(state, weights=False, state=True)

    # --- a look -------------------------------------------------------------------------------

    @torch.no_grad()
    def _close(self, window: Window, optimizer: Optimizer, *, stays_open: bool = False) -> None:
        """The end of a window.

        Raises:
            CorruptionError: on every rank alike.
        """
        now, then = Look(watched_of(optimizer)), window.look
        if not stays_open:
            window.close()
        names = names_of(optimizer, self._model())
        parameters = parameters_of(optimizer)
        peers = Peers(parameters, self._group)
        changed = [] if then is None else then.changed(now)
        found = [_said(one, names[one[0].watched.index]) for one in changed]
        if window is self._windows[0]:
            found += self._rest()
        found += differing(now, parameters, names, peers.device)
        if peers.any(torch.tensor(bool(found), device="cpu")):
            raise CorruptionError(
                f"memory changed without a write: {listed(peers.union(found))}. "
                "No optimizer stepped with it. Load the last checkpoint on all ranks; if it "
                "happens again, check the memory of that machine (its ECC counts). If your code "
                "wrote there between two steps, call rebase() of the guard after it."
            )

    def _rest(self) -> list[str]:
        """What changed of the parameters that no optimizer has."""
        before, self._resting = self._resting, self._look_at_rest()
        names = [name for name, _ in self._parameters_at_rest()]
        if before is None:
            return []
        return [_said(one, names[one[0].watched.index]) for one in before.changed(self._resting)]

    @torch.no_grad()
    def _look_at_rest(self) -> Look:
        resting = self._parameters_at_rest()
        return Look(Watched(i, p, WEIGHTS, 0, p) for i, (_, p) in enumerate(resting))

    def _parameters_at_rest(self) -> list[tuple[str, Tensor]]:
        model = self._model()
        if model is None:
            return []
        stepped = {id(p) for w in self._windows if w.optimizer for p in parameters_of(w.optimizer)}
        # What is gathered shows others, which the next gather fills anew.
        sharded: dict[tuple[nn.Module, str], Tensor] = {
            (owner.module, owner.name): p.parameter
            for _, _, unit in units_below(model)
            for group in unit.groups
            for p in group.shards.parameters
            for owner in p.owners
        }
        found: dict[int, tuple[str, Tensor]] = {}
        for prefix, module in model.named_modules():
            for name, held in module._parameters.items():
                p = sharded.get((module, name), held)
                if p is not None and id(p) not in stepped:
                    found.setdefault(id(p), (f"{prefix}.{name}" if prefix else name, p))
        return list(found.values())


class Window:
    """What one optimizer's parameters and state held after a step. See [Note: windows]."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.look: Look | None = None
        self.steps = 0
        self._meshes: list[DeviceMesh] = []

    def follow(self, meshes: list[DeviceMesh]) -> None:
        """Begin anew where other ranks hold the parameters now: those that came begin, too."""
        if self._meshes and not are_same(self._meshes, meshes):
            self.close()
            self.steps = 0
        self._meshes = meshes

    @property
    def optimizer(self) -> Optimizer | None:
        """``None`` when it is held no more."""
        return self._optimizer()

    @property
    def is_open(self) -> bool:
        """Whether the next step closes it; the same on all ranks."""
        return self.look is not None

    @torch.no_grad()
    def open(self, optimizer: Optimizer) -> None:
        """A step is over."""
        self.look = Look(watched_of(optimizer))

    def retake(self) -> None:
        """Compare with what memory holds now from here on, if it is open."""
        if self.is_open and self.optimizer is not None:
            self.open(self.optimizer)

    def close(self) -> None:
        """A step begins."""
        self.look = None


class _Call:
    """A hook of an optimizer's step that passes on which window it is for."""

    def __init__(self, call: Any, window: Window) -> None:
        self._call, self._window = call, window

    def __call__(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._call(self._window, optimizer)

    def remember(self) -> Callable[[], None]:
        """What an attempt calls when the step is undone: ranks may have ended it or not."""
        window, steps = self._window, self._window.steps

        def put_back() -> None:
            window.steps = steps
            window.close()

        return put_back


def _said(change: tuple[Seen, Seen], name: str) -> str:
    then, now = change
    entry = then.watched.entry
    what = f"'{name}'" if entry == WEIGHTS else f"'{entry}' of '{name}'"
    return f"{what} changed without a write on rank {this_rank()}{then.place(now)}"
