"""Runs, and the chunks of them that are stepped one after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from polyshard._torch.optimizers import local_of
from polyshard.errors import UnsupportedError
from polyshard.memory.addressed import tensor_at
from polyshard_optimizers.stepping.kept import joined, publish, state_of_run
from polyshard_optimizers.stepping.members import PLAIN_TYPES, Member
from polyshard_optimizers.stepping.runs import cut
from polyshard_optimizers.stepping.twins import Twins

LOOP_BYTES = 1 << 18
"""Of weights in a chunk, for each thread: with gradient, state and temporaries it fits a cache."""
FOREACH_BYTES = 1 << 21
"""Of weights in one foreach step on the CPU, where lists are gone through once an operation."""
MOST_BYTES = 1 << 23
"""Of weights stepped with temporaries at once. torch makes up to six as large: below 64 MiB."""


class Mode(Enum):
    """How torch steps the tensors of a parameter group."""

    LOOP = auto()
    FOREACH = auto()
    FUSED = auto()

    @classmethod
    def of(cls, group: Mapping[str, Any], device: torch.device) -> Mode:
        """What the user chose, or what torch does by itself."""
        if group.get("fused"):
            return cls.FUSED
        foreach = group.get("foreach")
        if foreach is None:
            foreach = "foreach" in group and device.type != "cpu"
        return cls.FOREACH if foreach else cls.LOOP

    def most_bytes(self, device: torch.device) -> int:
        """Of weights in one chunk; for foreach, in the chunks of one step."""
        if self is Mode.LOOP and device.type == "cpu":
            return min(LOOP_BYTES * torch.get_num_threads(), MOST_BYTES)
        return FOREACH_BYTES if device.type == "cpu" else MOST_BYTES


@dataclass(eq=False)
class Chunk:
    """A part of a run: what a twin takes for a parameter.

    ``views`` is its state, parts of the run's; ``state`` is the dict that the twin works on.
    """

    key: Tensor
    start: int
    stop: int
    views: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    def has_in_place(self, name: str) -> bool:
        """Whether the tensor ``name`` of the state is a part of the run's memory."""
        value = self.state[name]
        return isinstance(value, Tensor) and value is self.views.get(name)

    def settle(self) -> bool:
        """Have the step's results in the run's memory; whether it has a place for all of them.

        A new tensor of a class of its own has none: it may hold more than can be copied.
        """
        if self.state.keys() != self.views.keys():
            return False
        for name, view in self.views.items():
            value = self.state[name]
            if value is view:
                continue
            if isinstance(value, Tensor) and isinstance(view, Tensor):
                if value.shape != view.shape or value.dtype != view.dtype:
                    return False
                if type(local_of(value)) not in PLAIN_TYPES:
                    return False
                view.copy_(value)
                self.state[name] = view
            elif isinstance(value, Tensor) or isinstance(view, Tensor) or value != view:
                return False
        return True


class Run:
    """Members that are stepped together. See [Note: runs]."""

    def __init__(
        self, members: Sequence[Member], mode: Mode, gradient: Tensor | None = None
    ) -> None:
        """``members`` lie end to end in this order.

        With ``gradient``, that of one member, it is stepped at once and forgotten: quicker, but it
        holds memory.
        """
        self.members = members
        self.mode = mode
        self.group = members[0].group
        self.is_fresh = not members[0].state
        self._is_brief = gradient is not None
        weight = members[0].local.view(-1) if self._is_brief else joined([m.local for m in members])
        assert weight is not None
        self._weight = weight
        ranges = cut(len(weight), self._most())
        self.chunks = [Chunk(weight[start:stop], start, stop) for start, stop in ranges]
        self.address = members[0].gradient_address
        self.offsets = [m.gradient_address - self.address for m in members]
        if gradient is None:
            self.point(self.address)
        else:
            self._give(gradient.view(-1))
        if not self.is_fresh:
            self._take_state()

    def _most(self) -> int:
        """Elements of a chunk."""
        weight = self._weight
        if self.mode is Mode.FUSED or (self.members[0].is_pinned and _depends_on_threads(weight)):
            return max(len(weight), 1)
        nbytes = MOST_BYTES if self.is_fresh else self.mode.most_bytes(self._weight.device)
        return nbytes // self._weight.itemsize

    @property
    def nbytes(self) -> int:
        """Of its weights."""
        return self._weight.nbytes

    def point(self, address: int) -> None:
        """Its gradients begin at ``address`` from now on."""
        self.address = address
        numel = len(self._weight)
        self._give(tensor_at(address, numel, self._weight) if numel else self._weight)

    def _give(self, gradient: Tensor) -> None:
        for chunk in self.chunks:
            chunk.key.grad = gradient[chunk.start : chunk.stop]

    def _take_state(self) -> None:
        first = self.members[0]
        if self._is_brief:
            flat = {name: local_of(entry).view(-1) for name, entry in first.tensors.items()}
        else:
            flat = {name: state_of_run(self.members, name) for name in first.tensors}
        for chunk in self.chunks:
            for name in first.state or ():
                part = flat[name][chunk.start : chunk.stop] if name in flat else None
                chunk.views[name] = first.values.get(name) if part is None else part

    def lend_scalars(self) -> None:
        """Every chunk counts for itself, the first one in what people see (of one member)."""
        for name, scalar in self.members[0].scalars.items():
            for index, chunk in enumerate(self.chunks):
                chunk.views[name] = scalar.clone() if index else scalar

    def first_step(self, twins: Twins) -> None:
        """Step it without state; what that makes is its chunks' own until it is published."""
        batch = batch_of(self)
        twins.step(batch.parts, batch.state)
        for chunk in self.chunks:
            chunk.state = batch.state.pop(chunk.key, {})

    def settle(self) -> bool:
        """See :meth:`Chunk.settle`."""
        done = [chunk.settle() for chunk in self.chunks]
        return all(done)

    def publish(self, kind: str, states: Any) -> None:
        """Show each member's part of what chunks have, which has no place in the run yet.

        What has a place is shown already, and stays the same tensor: chunks only look at memory
        that members' state owns. A run of one step is shown whole, as its user has nothing yet.

        Raises:
            UnsupportedError: for state that is not of single elements.
        """
        for name in list(self.chunks[0].state):
            if not self._is_brief and all(chunk.has_in_place(name) for chunk in self.chunks):
                continue
            values = [chunk.state.pop(name) for chunk in self.chunks]
            first = values[0]
            if isinstance(first, Tensor) and first.ndim:
                if any(v.shape != c.key.shape for v, c in zip(values, self.chunks, strict=True)):
                    raise UnsupportedError(
                        f"{kind} keeps '{name}' of shape {tuple(first.shape)} for "
                        f"{len(self.chunks[0].key)} elements: it is not elementwise, or keeps it "
                        "in a form of its own. Leave the optimizer as it is."
                    )
                first = first if len(values) == 1 else torch.cat(values)
            publish(self.members, name, first, states)


def _depends_on_threads(weight: Tensor) -> bool:
    """Whether the last bit of elements depends on where threads cut what is stepped at once."""
    return weight.itemsize < 4 and weight.device.type == "cpu" and torch.get_num_threads() > 1


@dataclass(eq=False)
class Batch:
    """Runs, or parts of them, that one step of a twin takes."""

    parts: list[tuple[int, list[Tensor]]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    state: defaultdict[Any, Any] = field(default_factory=lambda: defaultdict(dict))
    nbytes: int = 0

    def add(self, group: int, chunk: Chunk) -> None:
        """Take one more chunk."""
        if not self.parts or self.parts[-1][0] != group:
            self.parts.append((group, []))
        self.parts[-1][1].append(chunk.key)
        self.chunks.append(chunk)
        if chunk.views:
            chunk.state = self.state[chunk.key] = dict(chunk.views)
        self.nbytes += chunk.key.nbytes


def batches_of(runs: Iterable[Run]) -> Iterator[Batch]:
    """Runs that have state, cut so that temporaries stay small. Groups come one after the other."""
    batch = Batch()
    for run in runs:
        for chunk in run.chunks:
            if run.mode is Mode.FOREACH:
                most = run.mode.most_bytes(chunk.key.device)
                if batch.chunks and batch.nbytes + chunk.key.nbytes > most:
                    yield batch
                    batch = Batch()
            batch.add(run.group, chunk)
    if batch.chunks:
        yield batch


def batch_of(run: Run) -> Batch:
    """All of one run."""
    batch = Batch()
    for chunk in run.chunks:
        batch.add(run.group, chunk)
    return batch
