"""One step of the user's optimizer, chunk by chunk.

[Note: twins]
Each chunk is stepped by a *twin*: an object of the optimizer's original class with the same
settings, whose groups hold only the chunk's parameters and whose state is what the pipeline has
just read. The arithmetic is the optimizer's own, on tensors of the same dtype and shape, so results
are the same to the last bit for every optimizer that treats parameters one by one, whatever its
state looks like. One that couples them through its groups is noticed and refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from polyshard_offload._torch_private import like, local_of, plain_step, spec_of
from polyshard_offload.errors import OffloadError
from polyshard_offload.optimizer.chunks import Chunk, Slot
from polyshard_offload.optimizer.open_shards import OPENED_SHELVES, OpenedShelves
from polyshard_offload.optimizer.pipeline import Pipeline
from polyshard_offload.optimizer.records import entries_of, twin_of
from polyshard_offload.optimizer.state import StateKeeper
from polyshard_offload.optimizer.step_in_backward import BackwardSteps
from polyshard_offload.tiers.state_store import DiskStore

if TYPE_CHECKING:
    from polyshard_offload.plugin import Offload


class StateOffload:
    """Steps one optimizer whose state is kept elsewhere. See [Note: twins]."""

    def __init__(self, optimizer: Optimizer, settings: Offload) -> None:
        """See :class:`polyshard_offload.optimizer.state.StateKeeper`."""
        self._optimizer = optimizer
        self._kind = type(optimizer)
        self._step = plain_step(self._kind)
        self._settings = settings
        self._tiers = settings.tiers
        self.keeper = StateKeeper(optimizer, settings)
        self.pipeline = Pipeline(self.keeper.store, self._device(), settings.prefetch + 1)
        self._opened = OpenedShelves()
        self._failure: Exception | None = None
        self._group_values: dict[int, dict[str, Any]] = {}
        chunk_bytes = settings.chunk_bytes
        self.in_backward = BackwardSteps(self, chunk_bytes) if settings.step_in_backward else None

    def _device(self) -> torch.device:
        """Where steps happen: beside the parameters."""
        slots = self.keeper.slots
        return next((local_of(s.parameter).device for s in slots), torch.device("cpu"))

    def buffer_bytes(self) -> int:
        """What a step takes beside what rests; predicted from chunks and shards."""
        chunks = self.keeper.refresh()
        largest = max((sum(s.nbytes for s in c.slots) for c in chunks), default=0)
        lanes = min(self._settings.prefetch + 1, len(chunks)) if self.keeper.streams else 0
        shelves = {id(c.shelf): c.shelf.shard_bytes for c in chunks if c.shelf is not None}
        opened = sum(sorted(shelves.values())[-OPENED_SHELVES:])
        return lanes * largest + opened

    def adopt_state(self) -> None:
        """Move to the tier what ``load_state_dict`` left in ``optimizer.state``."""
        self._abandon()
        if self.in_backward is not None:
            self.in_backward.abandon()
        self.keeper.adopt_loaded()
        self._failure = None

    def verify(self) -> None:
        """Read everything once where checksums are on, so that a bad page is an error here.

        Raises:
            CorruptedError: naming the place.
        """
        if self._settings.disk.checksums and isinstance(self.keeper.store, DiskStore):
            chunks = [c for c in self.keeper.refresh() if c.job().reads]
            jobs = [c.job() for c in chunks]
            self.pipeline.run([j.read_only() for j in jobs], lambda index, buffer: None)

    # Stepping ---------------------------------------------------------------------------------

    def step(self) -> None:
        """One step of every parameter that has a gradient.

        Raises:
            StorageError: when reading or writing fails; parameters are then partly updated.
            OffloadError: after such a failure, until a state dict is loaded.
        """
        self.check_whole()
        with self.guarded():
            if self.in_backward is not None:
                self.in_backward.finish()
            if self.in_backward is None or not self.in_backward.has_begun:
                self.begin()
            else:
                self.keeper.refresh()
                self.keeper.adopt_edits()
            self.run([c for c in self.keeper.refresh() if c.is_due])
            self.close_shelves()
        for group in self.groups:
            group.update(self._group_values.get(id(group), {}))
        if self.in_backward is not None:
            self.in_backward.clear()

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        return self._optimizer.param_groups

    def state_of(self, slot: Slot) -> dict[str, Any]:
        """What the user sees of a parameter's state."""
        found: dict[str, Any] = self._optimizer.state.get(slot.parameter, {})
        return found

    def check_whole(self) -> None:
        """Refuse to go on after a step that failed.

        Raises:
            OffloadError: from what happened.
        """
        if self._failure is not None:
            raise OffloadError(
                "an earlier step failed half way, so parameters and optimizer state do not belong "
                "together any more. Load model and optimizer from the last checkpoint."
            ) from self._failure

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """A part of a step: what it raises is remembered, told to other ranks, and final."""
        with self._tiers.reported("(optimizer)"):
            try:
                yield
            except Exception as error:
                self._failure = error
                self._abandon()
                raise

    def _abandon(self) -> None:
        """Let go of everything a failed step has in its hands."""
        self.pipeline.settle()
        self._opened.abandon({s.shelf for s in self.keeper.slots if s.shelf is not None})

    def begin(self) -> None:
        """A step begins: with what the user has made of state and groups since the last."""
        self.keeper.refresh()
        self.keeper.adopt_edits()
        self._group_values = {}

    def close_shelves(self) -> None:
        """Have parameters on disk written.

        Raises:
            StorageError: when that fails.
        """
        self._opened.close()

    def run(self, chunks: list[Chunk]) -> None:
        """Step ``chunks``, streaming their state where it streams."""
        if not self.keeper.streams:
            for index in range(len(chunks)):
                self._visit(chunks, index, None)
            return
        self.pipeline.run(
            [chunk.job() for chunk in chunks],
            lambda index, buffer: self._visit(chunks, index, buffer),
        )

    def visit(self, chunk: Chunk, buffer: Tensor | None) -> None:
        """Step one chunk whose state is in ``buffer``, with nothing but state read ahead."""
        self._visit([chunk], 0, buffer)

    def _visit(self, chunks: list[Chunk], index: int, buffer: Tensor | None) -> None:
        chunk = chunks[index]
        opened = self._opened.open(chunks, index)
        keys: dict[Slot, Tensor] = {}
        parts: dict[Slot, Tensor | None] = {}
        views: dict[Slot, dict[str, Tensor]] = {}
        state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        start = 0
        for slot in chunk.slots:
            part = buffer[start : start + slot.nbytes] if buffer is not None else None
            start += slot.nbytes
            if not slot.has_gradient:
                continue
            parts[slot] = part
            key = keys[slot] = self._key(slot, opened)
            views[slot] = self._views(slot, part)
            known = self._optimizer.state.get(slot.parameter, {})
            if known:
                state[key] = {**known, **views[slot]} if slot.filled else dict(known)
        self._step_twin(keys, state)
        for slot, key in keys.items():
            self._harvest(slot, views[slot], state[key], parts[slot])
            if slot.shelf is not None:
                local = local_of(slot.parameter)
                slot.shelf.note_stepped(local, local_of(key))

    def _views(self, slot: Slot, part: Tensor | None) -> dict[str, Tensor]:
        """The state tensors the step is to use, over the buffer or where they are kept."""
        if slot.record is None:
            return {}
        if part is not None:
            return slot.record.views(part)
        if not slot.windows:
            slot.show(slot.record.windows(self.keeper.store.window(slot.record.extent)))
        return slot.windows

    @staticmethod
    def _key(slot: Slot, opened: Tensor | None) -> Tensor:
        """What the step takes for the parameter: itself, or its values read from disk."""
        if slot.shelf is None or opened is None:
            return slot.parameter
        local = slot.shelf.part(local_of(slot.parameter), opened)
        stand_in = like(spec_of(slot.parameter), local)
        stand_in.grad = slot.parameter.grad
        return stand_in

    def _step_twin(self, keys: dict[Slot, Tensor], state: dict[Tensor, dict[str, Any]]) -> None:
        groups = [{**g, "params": []} for g in self.groups]
        for slot, key in keys.items():
            groups[slot.group]["params"].append(key)
        used = [i for i, g in enumerate(groups) if g["params"]]
        twin = twin_of(self._optimizer, self._kind, [groups[i] for i in used], state)
        self._step(twin)
        for index in used:
            self._note_group(index, groups[index])
        for name, value in twin.__dict__.items():
            if name not in ("param_groups", "state"):
                self._optimizer.__dict__[name] = value

    def _note_group(self, index: int, stepped: dict[str, Any]) -> None:
        """Keep what a step changed in a group's settings (counters, say); chunks must agree.

        Raises:
            OffloadError: for an optimizer that couples parameters.
        """
        before = self.groups[index]
        noted = self._group_values.setdefault(id(before), {})
        for name, value in stepped.items():
            if name == "params" or value is before.get(name):
                continue
            if name in noted and bool(noted[name] != value):
                raise OffloadError(
                    f"{self._kind.__name__} computed '{name}' of parameter group {index} from some "
                    "parameters at once: it couples parameters, which are stepped in chunks here. "
                    "Use Offload(optimizer='device') with it."
                )
            noted[name] = value

    def _harvest(
        self,
        slot: Slot,
        views: dict[str, Tensor],
        state: dict[str, Any],
        part: Tensor | None,
    ) -> None:
        """Put what the step left into the buffer, and publish it."""
        if slot.shelf is not None:
            torch.autograd.graph.increment_version(slot.parameter)
        entries = entries_of(state) if slot.offloaded else ()
        if not slot.offloaded or slot.record is None or slot.record.entries != entries:
            if state:
                self.keeper.keep(slot, state, part)
            elif slot.filled:
                self._optimizer.state.get(slot.parameter, {}).clear()
                self.keeper.forget(slot)
            return
        for entry in entries:
            new, kept = local_of(state[entry.name]), local_of(views[entry.name])
            if new.data_ptr() != kept.data_ptr():
                kept.copy_(new)
        self.keeper.publish(slot, state)
