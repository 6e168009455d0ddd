"""Optimizer state of runs: one tensor for a run, of which what people see are parts.

[Note: state of runs]
``optimizer.state`` shows every parameter's own state, as without runs: tensors of its shape that
begin a storage of their own (see [Note: own storage]), and counters of its own. Their memory lies
end to end, in the order of the run. Writes through them are writes to what is stepped. State that
does not lie so yet (it was loaded, or put there) is moved once; objects stay, over other memory,
because people may hold them.

Counters of parameters in one run are equal, and the run steps with one of its own. What people see
is written after each step, and compared before the next with what was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from polyshard._torch.optimizers import like, local_of, repointed, spec_of
from polyshard._torch.private import dtensor_spec
from polyshard.memory.addressed import tensor_at
from polyshard.memory.own_storage import own_storage
from polyshard_optimizers.stepping.members import Member
from polyshard_optimizers.stepping.runs import follow_each_other


def joined(locals_: Sequence[Tensor]) -> Tensor | None:
    """One flat tensor over tensors that lie end to end in this order; keeps none of them alive."""
    filled = [t for t in locals_ if t.numel()]
    if not filled:
        return torch.empty(0, dtype=locals_[0].dtype, device=locals_[0].device)
    if not follow_each_other((t.data_ptr(), t.nbytes) for t in filled):
        return None
    numel = sum(t.numel() for t in filled)
    return tensor_at(filled[0].data_ptr(), numel, filled[0])


def state_of_run(members: Sequence[Member], name: str) -> Tensor:
    """The entry ``name`` of all members as one tensor, moved together if it is not yet."""
    entries = [member.tensors[name] for member in members]
    found = joined([local_of(entry) for entry in entries])
    return _moved(members, name, entries) if found is None else found


def _moved(members: Sequence[Member], name: str, entries: Sequence[Tensor]) -> Tensor:
    first = local_of(entries[0])
    numel = sum(local_of(entry).numel() for entry in entries)
    flat = torch.empty(numel, dtype=first.dtype, device=first.device)
    start, seen = 0, set[int]()
    for member, entry in zip(members, entries, strict=True):
        local = local_of(entry)
        part = flat[start : start + local.numel()]
        part.copy_(local.view(-1))
        start += local.numel()
        window = like(spec_of(entry), own_storage(part.view(local.shape)))
        _put(member, name, entry, window, seen)
    return flat


def _put(member: Member, name: str, old: Tensor, window: Tensor, seen: set[int]) -> None:
    """Show ``window`` as the state; the same object, unless other parameters have that one too."""
    assert member.state is not None
    shown = window if id(old) in seen else repointed(old, window)
    seen.add(id(shown))
    member.state[name] = shown
    (member.scalars if window.ndim == 0 else member.tensors)[name] = shown


def publish(members: Sequence[Member], name: str, value: Any, states: Any) -> None:
    """Show what a run's first step made of ``name``: parts of a flat tensor, or copies."""
    start = 0
    for member in members:
        if isinstance(value, Tensor) and value.ndim:
            part = value[start : start + member.numel].view(member.local.shape)
            shown: Any = like(_spec(member, value.dtype), own_storage(part))
            start += member.numel
        else:
            shown = value.clone() if isinstance(value, Tensor) else value
        states[member.parameter][name] = shown


def _spec(member: Member, dtype: torch.dtype) -> object | None:
    """Of a tensor like the parameter."""
    parameter = member.parameter
    if not isinstance(parameter, DTensor) or parameter.dtype == dtype:
        return spec_of(parameter)
    return dtensor_spec(parameter.device_mesh, parameter.placements, parameter.shape, dtype)


class Counters:
    """The scalars of one name, dtype and device: what people see, and what chunks step with."""

    def __init__(self, name: str, members: Sequence[Member], chunks_of: Sequence[int]) -> None:
        """``chunks_of`` says how many chunks the run that each member leads has; 0 for others.

        A member that leads no run has the values of the one before it.
        """
        self.shown = [member.scalars[name] for member in members]
        found = joined(self.shown)
        if found is None:
            found = self._moved(name, members)
        self._seen = found
        leaders = [i for i, count in enumerate(chunks_of) for _ in range(count)]
        self.of_chunks = found[torch.tensor(leaders, device=found.device)]
        first_chunk: list[int] = []
        chunks = 0
        for count in chunks_of:
            first_chunk.append(chunks if count else first_chunk[-1])
            chunks += count
        self._chunk_of_member = torch.tensor(first_chunk, device=found.device)
        self._noted: Tensor | None = None
        self._versions: list[int] = []
        self._note()

    def _moved(self, name: str, members: Sequence[Member]) -> Tensor:
        flat = torch.stack(self.shown)
        seen: set[int] = set()
        for index, member in enumerate(members):
            _put(member, name, self.shown[index], own_storage(flat[index]), seen)
        self.shown = [member.scalars[name] for member in members]
        return flat

    def _note(self) -> None:
        """Remember what is shown. On an accelerator its values are not to be waited for."""
        if self._seen.device.type == "cpu":
            self._noted = self._seen.clone()
        else:
            self._versions = [scalar._version for scalar in self.shown]

    def holds(self) -> bool:
        """Whether what was shown is unchanged."""
        if self._noted is not None:
            return torch.equal(self._noted, self._seen)
        return [scalar._version for scalar in self.shown] == self._versions

    def show(self) -> None:
        """A step is over: people see the counters of the run."""
        torch.index_select(self.of_chunks, 0, self._chunk_of_member, out=self._seen)
        if self._noted is not None:
            self._noted.copy_(self._seen)


def read_scalars(scalars: Iterable[Tensor]) -> list[float]:
    """The values of 0-dim tensors, of one device at once."""
    every = list(scalars)
    values: list[float] = [0.0] * len(every)
    places: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, scalar in enumerate(every):
        places.setdefault((scalar.dtype, scalar.device), []).append(index)
    for indices in places.values():
        read = cast("list[float]", torch.stack([every[i] for i in indices]).tolist())
        for index, value in zip(indices, read, strict=True):
            values[index] = value
    return values
