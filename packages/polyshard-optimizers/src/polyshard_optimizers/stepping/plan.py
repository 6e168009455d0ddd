"""What a step does, as long as nothing changes: which runs, in which chunks, over which memory.

[Note: does the plan hold]
Users may change anything between steps: groups, gradients, state, memory of parameters. A plan
notes what it relies on, and looks at it before each step, in a few loops over everything but state
that was not shown to other code (see [Note: sealed state]).
That is most of what a step of small parameters takes, mostly by waiting for memory: a parameter,
its gradient, its state and what is local of each are ten objects, and any tensor of them can get
other memory (``.data =``, ``set_``, ``share_memory_``) with no trace but its address. There is no
count of changes to compare instead. What does not hold makes a new plan; gradients that moved
together (they are in new memory after each step whose gradients were kept) only new addresses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from polyshard._torch.optimizers import (
    gradients_of,
    local_of,
    locals_of,
    quick_reads,
    spec_of,
    specs_of,
    state_of,
)
from polyshard_optimizers.stepping.chunks import Mode, Run, batches_of
from polyshard_optimizers.stepping.keeper import OptimizerKeeper
from polyshard_optimizers.stepping.kept import Counters, read_scalars
from polyshard_optimizers.stepping.members import PLAIN_TYPES, Member, survey
from polyshard_optimizers.stepping.runs import VECTORS_BYTES, Stretch, find_runs
from polyshard_optimizers.stepping.sealed import Holdings, Seal
from polyshard_optimizers.stepping.twins import Twins, every_parameter

_PLAIN = frozenset(PLAIN_TYPES)
_FORM = attrgetter("dtype", "layout")  # mapped over many, it takes less time than loops


def make_runs(members: Sequence[Member], optimizer: Optimizer) -> list[Run]:
    """Members by run; runs are in the order of their parameter groups."""
    scalars = iter(read_scalars(chain.from_iterable(m.scalars.values() for m in members)))
    kinds: dict[tuple[object, ...], list[Member]] = {}
    for member in members:
        values = tuple(next(scalars) for _ in member.scalars)
        kinds.setdefault((member.kind, values), []).append(member)
    runs = []
    for alike in kinds.values():
        first = alike[0]
        mode = Mode.of(optimizer.param_groups[first.group], first.local.device)
        if not first.numel:
            runs.append(Run(alike, mode))
            continue
        stretches = [Stretch(m.local.data_ptr(), m.gradient_address, m.local.nbytes) for m in alike]
        for indices in find_runs(stretches, _unit_bytes(first.local, mode)):
            runs.append(Run([alike[i] for i in indices], mode))
    return sorted(runs, key=lambda run: run.group)


def _unit_bytes(local: Tensor, mode: Mode) -> int:
    """See [Note: bits of joined parameters]."""
    if local.device.type != "cpu":
        return 1
    return VECTORS_BYTES if mode is Mode.FUSED or local.itemsize < 4 else 1


class Plan:
    """One step of an optimizer. See [Note: does the plan hold]."""

    def __init__(
        self, optimizer: Optimizer, twins: Twins, keeper: OptimizerKeeper | None = None
    ) -> None:
        """Look at everything as it is now, but for what ``keeper`` lends."""
        self._optimizer = optimizer
        self._twins = twins
        self.is_spent = False
        found = survey(optimizer, keeper)
        self._apart = found.apart
        self.runs = make_runs(found.members, optimizer)
        self._counters = self._make_counters()
        self._fresh = [run for run in self.runs if run.is_fresh]
        self._batches = list(batches_of(run for run in self.runs if not run.is_fresh))
        self._watch_parameters()
        self.seal = Seal(can_close=keeper is None)
        self._watch_state()

    def _make_counters(self) -> list[Counters]:
        chunks_of = {id(run.members[0]): len(run.chunks) for run in self.runs}
        by_kind: dict[tuple[str, torch.dtype, torch.device], list[Run]] = {}
        for run in self.runs:
            for name, scalar in run.members[0].scalars.items():
                by_kind.setdefault((name, scalar.dtype, scalar.device), []).append(run)
        made = []
        for (name, _, _), runs in by_kind.items():
            members = [member for run in runs for member in run.members]
            counts = [chunks_of.get(id(member), 0) for member in members]
            counters = Counters(name, members, counts)
            made.append(counters)
            chunks = [chunk for run in runs for chunk in run.chunks]
            for chunk, scalar in zip(chunks, counters.of_chunks.unbind(), strict=True):
                chunk.views[name] = scalar
        return made

    # What it relies on --------------------------------------------------------------------------

    def _watch_parameters(self) -> None:
        groups = self._optimizer.param_groups
        self._lengths = [len(group["params"]) for group in groups]
        self._modes = self._find_modes()
        self._every = every_parameter(self._optimizer)
        runs = {id(m.parameter): (m, run) for run in self.runs for m in run.members}
        self._watched = [runs[id(p)][0] for p in self._every if id(p) in runs]
        self._stepped = [m.parameter for m in self._watched]
        filled = [m for m in self._watched if m.numel]
        sharded = [m for m in filled if m.is_sharded]
        plain = [m for m in filled if not m.is_sharded]
        in_runs = {id(m.parameter) for m in filled}
        self._others = [p for p in self._every if id(p) not in in_runs]
        self._absent = [p.grad is None for p in self._others]
        self._sharded = [m.parameter for m in sharded]
        self._specs = [spec_of(p.grad) for p in self._sharded if p.grad is not None]
        self._locals = [m.local for m in sharded]
        self._plain = [m.parameter for m in plain]
        self._forms = list(map(_FORM, chain(self._locals, self._plain)))
        self._has_complex = any(dtype.is_complex for dtype, _ in self._forms)
        self._weights = _addresses(chain(self._locals, self._plain))
        self._gradients = [m.gradient_address for m in chain(sharded, plain)]
        places = {id(m): i for i, m in enumerate(chain(sharded, plain))}
        self._places = [
            (run, [places[id(m)] for m in run.members]) for run in self.runs if run.nbytes
        ]

    def _find_modes(self) -> list[tuple[Any, ...]]:
        return [(g.get("fused"), g.get("foreach")) for g in self._optimizer.param_groups]

    def _watch_state(self) -> None:
        self._states = states = state_of(self._optimizer)
        self._keys, self._dicts = list(states), list(states.values())
        self._own = [m.state for m in self._watched if m.state is not None]
        self._entries = list(chain.from_iterable(map(dict.values, self._own)))
        tensors = [t for m in self._watched for t in m.tensors.values()]
        self._windows = [t for t in tensors if local_of(t) is not t]
        scalars = chain.from_iterable(m.scalars.values() for m in self._watched)
        self._plain_state = [*(t for t in tensors if local_of(t) is t), *scalars]
        self._state_addresses = self._find_state()
        self._holdings = Holdings(states, self._own, self._known())

    def _known(self) -> Iterator[object]:
        """State, once for every reference that this plan and its parts have to it."""
        yield self._states
        yield from chain(self._dicts, self._own, self._entries, self._windows, self._plain_state)
        for run in self.runs:
            for member in run.members:
                yield member.state
                yield from chain(member.tensors.values(), member.scalars.values())
        for counters in self._counters:
            yield from counters.shown

    def _find_state(self) -> list[int]:
        return _addresses(chain(locals_of(self._windows), self._plain_state))

    def holds(self) -> bool:
        """Whether a step can be made as planned."""
        if self.is_spent:
            return False
        with quick_reads():
            return self._parameters_hold() and self._state_holds() and self._gradients_hold()

    def _parameters_hold(self) -> bool:
        groups = self._optimizer.param_groups
        if [len(g["params"]) for g in groups] != self._lengths:
            return False
        if not all(map(is_, chain.from_iterable(g["params"] for g in groups), self._every)):
            return False
        found = locals_of(self._sharded)
        if self._find_modes() != self._modes or not all(map(is_, found, self._locals)):
            return False
        return _addresses(chain(found, self._plain)) == self._weights

    def _state_holds(self) -> bool:
        if state_of(self._optimizer) is not self._states:
            return False
        if self.seal.is_closed:
            return True
        if not self._all_state_holds():
            return False
        self.seal.try_to_close(self._holdings)
        return True

    def _all_state_holds(self) -> bool:
        states = self._states
        if len(states) != len(self._keys):
            return False
        if not (all(map(is_, states, self._keys)) and all(map(is_, states.values(), self._dicts))):
            return False
        entries = list(chain.from_iterable(map(dict.values, self._own)))
        if len(entries) != len(self._entries) or not all(map(is_, entries, self._entries)):
            return False
        del entries  # references are counted soon
        # Every tensor can get other memory and leave no trace: by ``.data =``, by being shared.
        if self._find_state() != self._state_addresses:
            return False
        return all(counters.holds() for counters in self._counters)

    def _gradients_hold(self) -> bool:
        if [p.grad is None for p in self._others] != self._absent:
            return False
        sharded: list[Any] = gradients_of(self._sharded)
        plain: list[Any] = gradients_of(self._plain)
        try:
            if not all(map(is_, specs_of(sharded), self._specs)):
                return False
            gradients = [*locals_of(sharded), *plain]
        except AttributeError:  # none, or one of another class
            return False
        if not (set(map(type, gradients)) <= _PLAIN and self._are_dense(gradients)):
            return False
        found = _addresses(gradients)
        return found == self._gradients or self._follow(found)

    def _are_dense(self, gradients: list[Tensor]) -> bool:
        """Whether memory of ``gradients`` holds their elements in order, and just as they are."""
        if list(map(_FORM, gradients)) != self._forms:
            return False
        if any(map(Tensor.is_neg, gradients)):
            return False
        if self._has_complex and any(map(Tensor.is_conj, gradients)):
            return False
        return all(map(Tensor.is_contiguous, gradients))

    def _follow(self, addresses: list[int]) -> bool:
        """Use gradients that moved, if those of each run did so together."""
        for run, places in self._places:
            first = addresses[places[0]]
            if [addresses[place] - first for place in places] != run.offsets:
                return False
        for run, places in self._places:
            if run.address != addresses[places[0]]:
                run.point(addresses[places[0]])
        self._gradients = addresses
        return True

    # Stepping -----------------------------------------------------------------------------------

    def step(self) -> None:
        """Step everything that has a gradient."""
        with torch.no_grad():
            for batch in self._batches:
                self._twins.step(batch.parts, batch.state)
            changed = [run for run in self.runs if not (run.is_fresh or run.settle())]
            for counters in self._counters:
                counters.show()
            for run in changed:
                self._publish(run)
            for run in self._fresh:
                self._step_first(run)
            self._step_apart()
        if self._stepped:
            torch.autograd.graph.increment_version(self._stepped)

    def _step_first(self, run: Run) -> None:
        """Step a run that has no state; what the step makes of it becomes the parameters'."""
        run.first_step(self._twins)
        if run.chunks[0].state:
            self._publish(run)

    def _publish(self, run: Run) -> None:
        run.publish(type(self._optimizer).__name__, state_of(self._optimizer))
        self.is_spent = True

    def _step_apart(self) -> None:
        """Step the others as torch does."""
        if not self._apart:
            return
        parts: dict[int, list[Tensor]] = {}
        for group, parameter in self._apart:
            parts.setdefault(group, []).append(parameter)
        states = self._states
        state: defaultdict[Any, Any] = defaultdict(dict)
        state.update({p: states[p] for _, p in self._apart if p in states})
        self._twins.step(parts.items(), state)
        for parameter, own in state.items():
            if states.get(parameter) is not own:
                states[parameter] = own
                self.is_spent = True


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))
