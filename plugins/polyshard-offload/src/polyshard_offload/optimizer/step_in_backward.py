"""Steps of the user's optimizer while backward runs, as soon as gradients are reduced.

[Note: stepping in backward]
A parameter's hook says that its reduced gradient is in place; the end of its group's reduction (or
a chunk's worth of landed gradients, for parameters that no group owns) has all of them stepped. The
gradients are then freed, so a model's gradients are never there together. What a step does to a
parameter depends on that parameter alone (see [Note: lent chunks]), so the order changes
no bit. State is read ahead in the order of the backward before; another order costs the reading
ahead, nothing else.

A step cannot be taken back. So everything that would have changed a gradient, a setting or state
after backward is an error, not a difference: a spent gradient refuses to be used, a second gradient
is refused, and so are parameter groups and optimizer state that were changed before
``optimizer.step()``. After a backward that raised half way only a checkpoint helps.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyshard.plugins.seams import local_of
from polyshard_offload._torch_private import at_end_of_backward, norms_of
from polyshard_offload.errors import OffloadError
from polyshard_offload.optimizer.chunks import Chunk, Slot, plan_chunks
from polyshard_offload.optimizer.pipeline import Stream
from polyshard_offload.optimizer.spent import MESSAGE, SpentGradient, spend
from polyshard_offload.optimizer.step import StateOffload

Traces = Mapping[str, tuple[object, tuple[int, int] | None]]


class BackwardSteps:
    """What of one step has happened in backward. See [Note: stepping in backward]."""

    def __init__(self, offload: StateOffload, chunk_bytes: int) -> None:
        """Watch all trainable parameters of ``offload``."""
        self._offload = offload
        self._chunk_bytes = chunk_bytes
        self._hooked: set[int] = set()
        self._landed: list[Slot] = []
        self._spent: set[int] = set()
        self._ended = True
        self._settings: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._groups: dict[int, dict[str, Any]] = {}
        self._left: dict[int, tuple[Slot, Traces]] = {}
        self._cuts: dict[tuple[tuple[int, int], ...], list[Chunk]] = {}
        self._order: list[Chunk] = []
        self._done: list[Chunk] = []
        self._norms: dict[int, Tensor] = {}
        self._stream: Stream | None = None
        self.watch()

    def watch(self) -> None:
        """Hook parameters that came, or were unfrozen, since the last call."""
        for slot in self._offload.state.slots:
            if id(slot) not in self._hooked and slot.parameter.requires_grad:
                self._hooked.add(id(slot))
                slot.parameter.register_post_accumulate_grad_hook(_hook(self, slot))

    # While backward runs ----------------------------------------------------------------------

    def land(self, slot: Slot) -> None:
        """The gradient of ``slot`` is in place.

        Raises:
            OffloadError: when it was stepped already, or an earlier step failed.
        """
        self._offload.check_whole()
        if not (self._landed or self._spent):
            self._offload.state.refresh()
        if not slot.is_member:
            return
        if id(slot) in self._spent:
            self._check_ended()  # of a rank whose step was refused for another rank's failure
            raise OffloadError(f"a parameter got a second gradient before step(): {MESSAGE}")
        if not any(known is slot for known in self._landed):
            self._landed.append(slot)
        if len(self._landed) == 1:
            at_end_of_backward(self.end)
        if sum(landed.weight for landed in self._landed) >= self._chunk_bytes:
            self.flush()

    def flush(self) -> None:
        """Step what has landed, and free its gradients.

        Raises:
            StorageError: when reading or writing fails; parameters are then partly updated.
        """
        landed, self._landed = [s for s in self._landed if s.has_gradient], []
        if not landed:
            return
        with self._offload.guarded(), torch.no_grad():
            if not self._spent:
                self._begin()
            self._ended = False
            at_end_of_backward(self.end)
            for chunk in self._cut(landed):
                self._step(chunk)

    def _begin(self) -> None:
        offload = self._offload
        offload.begin()
        self._settings = [(group, _settings_of(group)) for group in offload.groups]
        self._groups = {id(slot): offload.groups[slot.group] for slot in offload.state.slots}
        self._left = {}
        self._done = []
        self._norms = {}
        if offload.state.streams:
            self._stream = offload.pipeline.stream([chunk.job() for chunk in self._order])

    def _cut(self, landed: Sequence[Slot]) -> list[Chunk]:
        """Chunks of ``landed``; the same objects whenever the same parameters land together."""
        key = tuple((id(slot), id(slot.storage)) for slot in landed)
        if key not in self._cuts:
            self._cuts[key] = plan_chunks(landed, self._chunk_bytes)
        return self._cuts[key]

    def _step(self, chunk: Chunk) -> None:
        index = len(self._done)
        expected = self._order[index] if index < len(self._order) else None
        if self._stream is not None and chunk is expected:
            self._stream.advance(lambda buffer: self._offload.visit([chunk], 0, buffer))
        else:
            self._leave_stream()
            self._offload.run([chunk])
        self._done.append(chunk)
        self._spend(chunk)

    def _spend(self, chunk: Chunk) -> None:
        """Free the gradients of a chunk that was stepped; what remains is their norms."""
        for slots in _by_dtype(chunk.slots):
            gradients = [local_of(s.parameter.grad) for s in slots if s.parameter.grad is not None]
            for slot, norm in zip(slots, norms_of(gradients), strict=True):
                self._norms[id(slot.parameter)] = norm
        for slot in chunk.slots:
            spend(slot.parameter)
            self._spent.add(id(slot))
            self._left[id(slot)] = (slot, _traces(self._offload.state_of(slot)))

    def norm_of(self, parameter: Tensor) -> Tensor | None:
        """The 2-norm of the local part of a spent gradient."""
        is_spent = isinstance(parameter.grad, SpentGradient)
        return self._norms.get(id(parameter)) if is_spent else None

    def _leave_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.finish()

    def end(self) -> None:
        """Backward has ended: have everything stepped and written.

        Raises:
            StorageError: when that fails.
        """
        self.flush()
        if self._ended:
            return
        with self._offload.guarded():
            self._leave_stream()
            self._offload.close_shards()
        self._ended = True
        self._order = self._done

    # At the user's step -----------------------------------------------------------------------

    def step(self) -> None:
        """Step what backward has left, after a look at whether all it did still holds.

        Raises:
            StorageError: when reading or writing fails; parameters are then partly updated.
            OffloadError: after such a failure, or for what came too late.
        """
        offload = self._offload
        offload.check_whole()
        with offload.guarded():
            self.finish()
            if self._spent:
                offload.adopt_edits()
            else:
                offload.begin()
            offload.step_due()
        offload.end()
        self.clear()

    def adopt_state(self) -> None:
        """Start anew from a state dict that was just loaded."""
        self.abandon()
        self._offload.adopt_state()

    def finish(self) -> None:
        """The user calls ``step()``: what was done in backward is a part of it.

        Raises:
            OffloadError: when it is not what the user asks for now, or is not whole.
        """
        self.watch()
        self._landed.clear()
        if not self._spent:
            return
        self._check_ended()
        self._check_settings()
        self._check_members()
        self._check_state()

    def _check_ended(self) -> None:
        if not self._ended:
            raise OffloadError(
                "backward raised after the optimizer had stepped some parameters in it "
                "(step_in_backward=True). Load model and optimizer from the last checkpoint."
            )

    def _check_settings(self) -> None:
        for index, (group, before) in enumerate(self._settings):
            now = _settings_of(group)
            for name, value in before.items():
                if name not in now or not _same(value, now[name]):
                    raise OffloadError(
                        f"'{name}' of parameter group {index} was changed from {value!r} to "
                        f"{now.get(name)!r} {LATE} {REMEDY}"
                    )

    def _check_members(self) -> None:
        state, groups = self._offload.state, self._offload.groups
        state.refresh()
        for key, (slot, _) in self._left.items():
            if not slot.is_member or groups[slot.group] is not self._groups[key]:
                shape = tuple(slot.parameter.shape)
                what = "moved to another group" if slot.is_member else "taken out of its group"
                raise OffloadError(f"a parameter of shape {shape} was {what} {LATE} {REMEDY}")

    def _check_state(self) -> None:
        for slot, traces in self._left.values():
            if not _leads_to(traces, self._offload.state_of(slot)):
                shape = tuple(slot.parameter.shape)
                raise OffloadError(
                    f"the optimizer state of a parameter of shape {shape} was changed {LATE} "
                    f"{REMEDY}"
                )

    def clear(self) -> None:
        """A step is over, or what it did was loaded anew."""
        self._spent.clear()
        self._left = {}

    def abandon(self) -> None:
        """Forget a backward that failed, and its spent gradients."""
        self._landed.clear()
        self._stream = None
        self._ended = True
        self._order = []
        self.clear()
        for slot in self._offload.state.slots:
            if isinstance(slot.parameter.grad, SpentGradient):
                slot.parameter.grad = None


LATE = (
    "between backward and step(), but with Offload(step_in_backward=True) backward has used it "
    "already."
)
REMEDY = "Change it before backward, or after step() as schedulers do."


def _hook(steps: BackwardSteps, slot: Slot) -> Callable[[Tensor], None]:
    """Holds nothing: a parameter may outlive its optimizer."""
    watcher, watched = weakref.ref(steps), weakref.ref(slot)

    def landed(parameter: Tensor) -> None:
        del parameter
        alive, known = watcher(), watched()
        if alive is not None and known is not None:
            alive.land(known)

    return landed


def _by_dtype(slots: Sequence[Slot]) -> list[list[Slot]]:
    found: dict[torch.dtype, list[Slot]] = {}
    for slot in slots:
        found.setdefault(slot.parameter.dtype, []).append(slot)
    return list(found.values())


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Of one parameter group, copied: they may be changed in place."""
    return {name: _copied(value) for name, value in group.items() if name != "params"}


def _copied(value: object) -> object:
    if isinstance(value, Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, list | dict | set) else value


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _traces(state: Mapping[str, Any]) -> Traces:
    """What ``state`` holds, and how often it was written to."""
    return {name: (value, _versions(value)) for name, value in state.items()}


def _versions(value: object) -> tuple[int, int] | None:
    return (value._version, local_of(value)._version) if isinstance(value, Tensor) else None


def _leads_to(traces: Traces, state: Mapping[str, Any]) -> bool:
    """Whether nothing was put into ``state`` since, or written to its tensors."""
    return traces.keys() == state.keys() and all(
        state[name] is value and _versions(value) == versions
        for name, (value, versions) in traces.items()
    )
