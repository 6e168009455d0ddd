"""What tensors held when they were looked at, and which of them hold something else later.

[Note: who wrote]
A flipped bit leaves no trace but the value. A write mostly leaves one: a version counter that torch
counts up, memory that is elsewhere now, another object. So what differs without a trace was not
written by the program, and what differs with one is taken as it is. Writes that torch does not
count (``.data``, foreach operations on ``DTensor`` s) look like flipped bits: callers declare them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from polyshard.engine.trees import tensors
from polyshard_resilience.guards.digests import digest, parts, place_of, summary
from polyshard_resilience.guards.names import parameters_of

Traces = tuple[tuple[int, int], ...]
Key = tuple[int, str, int]
WEIGHTS = ""


@dataclass(frozen=True, eq=False)
class Watched:
    """A tensor that only an optimizer writes: a parameter, or some of its state.

    Attributes:
        index: of the parameter, among those of its optimizer.
        parameter: the parameter.
        entry: name of the state, or :data:`WEIGHTS`.
        number: which of the entry's tensors.
        value: the tensor.
    """

    index: int
    parameter: Tensor
    entry: str
    number: int
    value: Tensor

    @property
    def key(self) -> Key:
        """The same whatever object is there."""
        return self.index, self.entry, self.number


def watched_of(optimizer: Optimizer) -> Iterator[Watched]:
    """Parameters and state of an optimizer."""
    for index, parameter in enumerate(parameters_of(optimizer)):
        yield Watched(index, parameter, WEIGHTS, 0, parameter)
        for entry, value in optimizer.state.get(parameter, {}).items():
            for number, tensor in enumerate(tensors(value)):
                yield Watched(index, parameter, str(entry), number, tensor)


@dataclass(frozen=True, eq=False)
class Seen:
    """One tensor as it was: its digest, and the traces that writes would have changed."""

    watched: Watched
    sums: Tensor
    traces: Traces

    def was_written(self, now: Seen) -> bool:
        """Whether a write was counted since, or it is another tensor."""
        return self.watched.value is not now.watched.value or self.traces != now.traces

    def place(self, now: Seen) -> str:
        """Where in this rank's part the change is, as far as sums tell."""
        every = list(parts(now.watched.value))
        if len(every) != 1 or self.sums.numel() == 1:
            return ""
        start, stop = place_of(self.sums, now.sums, every[0].nbytes)
        size = every[0].itemsize
        return f", elements {start // size} to {stop // size - 1} of its part"


class Look:
    """Digests of many tensors at one moment."""

    def __init__(self, watched: Iterable[Watched]) -> None:
        """Read all of them, and wait for nothing."""
        self.seen = {w.key: Seen(w, digest(w.value), _traces(w.value)) for w in watched}
        self._all = _by_device(self.seen.values())
        self._parameters = {id(one.watched.parameter) for one in self.seen.values()}

    def forget(self, parameters: Iterable[Tensor], *, weights: bool, state: bool) -> None:
        """The program wrote them."""
        gone = {id(parameter) for parameter in parameters}
        if gone.isdisjoint(self._parameters):
            return
        for key, seen in list(self.seen.items()):
            wanted = weights if seen.watched.entry == WEIGHTS else state
            if wanted and id(seen.watched.parameter) in gone:
                del self.seen[key]
        self._all = {}

    def changed(self, now: Look) -> list[tuple[Seen, Seen]]:
        """What differs from ``now`` without having been written. See [Note: who wrote]."""
        if self.seen.keys() == now.seen.keys() and _equal(self._all, now._all):
            return []
        return [
            (then, now.seen[key])
            for key, then in self.seen.items()
            if key in now.seen
            and not torch.equal(then.sums, now.seen[key].sums)
            and not then.was_written(now.seen[key])
        ]

    def summaries(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """For each of ``count`` parameters one number for its weights, one for its state."""
        nothing = torch.zeros((), dtype=torch.int64, device="cpu")
        found = [[nothing, nothing] for _ in range(count)]
        for (index, entry, number), seen in self.seen.items():
            is_state = entry != WEIGHTS
            factor = 2 * zlib.crc32(f"{entry} {number}".encode()) + 1  # odd: loses nothing
            found[index][is_state] = found[index][is_state] + summary(seen.sums) * factor
        return [(weights, state) for weights, state in found]


def _traces(value: Tensor) -> Traces:
    every: Sequence[Tensor] = [value, *parts(value)]
    return tuple((0 if t.is_inference() else t._version, _address(t)) for t in every)


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if type(tensor) is Tensor else 0


def _by_device(seen: Iterable[Seen]) -> dict[torch.device, Tensor]:
    """All sums end to end, so that they are compared at once."""
    sums: dict[torch.device, list[Tensor]] = {}
    for one in seen:
        sums.setdefault(one.sums.device, []).append(one.sums)
    return {device: torch.cat(every) for device, every in sums.items()}


def _equal(first: dict[torch.device, Tensor], second: dict[torch.device, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(sums, second[device]) for device, sums in first.items()
    )
