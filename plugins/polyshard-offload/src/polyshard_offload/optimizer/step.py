"""One step of the user's optimizer, chunk by chunk.

[Note: lent chunks]
The parameters of a chunk are lent to the optimizer's stepper with the state that the pipeline has
just read; :class:`polyshard.plugins.seams.Stepper` has its twins step them, as runs if the
optimizer is elementwise and else whole. The arithmetic is the optimizer's own, so results are
bitwise the same for every optimizer that treats parameters one by one, whatever its state looks
like. What can be stepped where it is, is no part of any chunk: those are runs as without offload.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from polyshard.plugins.seams import like, local_of, spec_of
from polyshard_offload.errors import OffloadError
from polyshard_offload.optimizer.chunks import Chunk, Slot
from polyshard_offload.optimizer.open_shards import OPEN_SHARDS, OpenShards
from polyshard_offload.optimizer.pipeline import Pipeline
from polyshard_offload.optimizer.state import OptimizerState
from polyshard_offload.resources import Resources
from polyshard_offload.tiers.state_store import DiskStore
from polyshard_optimizers.stepping import Lent, Stepper


class StateOffload:
    """Steps one optimizer whose state is kept elsewhere. See [Note: lent chunks]."""

    def __init__(self, optimizer: Optimizer, stepper: Stepper, resources: Resources) -> None:
        """See :class:`polyshard_offload.optimizer.state.OptimizerState`."""
        self._optimizer = optimizer
        self._stepper = stepper
        self._resources = resources
        self._settings = resources.settings
        self.state = OptimizerState(optimizer, stepper, resources)
        self.pipeline = Pipeline(self.state.store, self._device(), self._settings.prefetch + 1)
        self._open_shards = OpenShards()
        self._failure: BaseException | None = None

    def _device(self) -> torch.device:
        """Where steps with streamed state happen: beside the parameters."""
        slots = [slot for slot in self.state.slots if slot.offloaded]
        return next((local_of(s.parameter).device for s in slots), torch.device("cpu"))

    def buffer_bytes(self) -> int:
        """What a step takes beside what rests; predicted from chunks and shards."""
        chunks = self.state.refresh()
        largest = max((sum(s.nbytes for s in c.slots) for c in chunks), default=0)
        lanes = min(self._settings.prefetch + 1, len(chunks)) if self.state.streams else 0
        shards = {id(c.storage): c.storage.shard_bytes for c in chunks if c.storage is not None}
        opened = sum(sorted(shards.values())[-OPEN_SHARDS:])
        return lanes * largest + opened

    def adopt_state(self) -> None:
        """Move to the tier what ``load_state_dict`` left in ``optimizer.state``."""
        self.undo()
        self.state.adopt_loaded()

    def undo(self) -> None:
        """Let go of a step that failed: the caller puts back what it changed."""
        self._abandon()
        self._failure = None

    def verify(self) -> None:
        """Read everything once where checksums are on, so that a bad page is an error here.

        Raises:
            CorruptedError: naming the place.
        """
        if self._settings.disk.checksums and isinstance(self.state.store, DiskStore):
            chunks = [c for c in self.state.refresh() if c.job().reads]
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
            self.begin()
            self.step_due()
        self.end()

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        return self._optimizer.param_groups

    def state_of(self, slot: Slot) -> dict[str, Any]:
        """What the user sees of a parameter's state."""
        found: dict[str, Any] = self._optimizer.state.get(slot.parameter, {})
        return found

    def check_whole(self) -> None:
        """Refuse to continue after a step that failed.

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
        """A part of a step: what it raises is remembered, told to other ranks, and final.

        That includes what is no ``Exception``: a step that the user interrupts is half done, too.
        """
        with self._resources.reported("(optimizer)"):
            try:
                yield
            except BaseException as error:
                self._failure = error
                self._abandon()
                raise

    def _abandon(self) -> None:
        """Let go of everything a failed step has in its hands."""
        self.pipeline.settle()
        self._open_shards.abandon({s.storage for s in self.state.slots if s.storage is not None})

    def adopt_edits(self) -> None:
        """Take over what the user changed in state and groups. See [Note: edits] of ``state``."""
        self.state.refresh()
        self.state.adopt_edits()

    def begin(self) -> None:
        """A step begins: with what the user has made of state and groups since the last."""
        self.adopt_edits()
        self._stepper.twins.begin()

    def step_due(self) -> None:
        """Step every parameter that has a gradient now.

        Raises:
            StorageError: when reading or writing fails.
        """
        self.run([c for c in self.state.refresh() if c.is_due])
        self.close_shards()
        if any(slot.in_runs for slot in self.state.slots):
            self._stepper.step_runs()

    def end(self) -> None:
        """A step has ended: groups show what it changed in their settings."""
        self._stepper.twins.end()

    def close_shards(self) -> None:
        """Have parameters on disk written.

        Raises:
            StorageError: when that fails.
        """
        self._open_shards.close()

    def run(self, chunks: list[Chunk]) -> None:
        """Step ``chunks``, streaming their state where it streams."""
        if not self.state.streams:
            for index in range(len(chunks)):
                self.visit(chunks, index, None)
            return
        self.pipeline.run(
            [chunk.job() for chunk in chunks],
            lambda index, buffer: self.visit(chunks, index, buffer),
        )

    def visit(self, chunks: list[Chunk], index: int, buffer: Tensor | None) -> None:
        """Step the chunk ``index``, whose state is in ``buffer``; read ahead for those after it."""
        chunk = chunks[index]
        opened = self._open_shards.open(chunks, index)
        lent: dict[Slot, Lent] = {}
        parts: dict[Slot, Tensor | None] = {}
        start = 0
        for slot in chunk.slots:
            part = buffer[start : start + slot.nbytes] if buffer is not None else None
            start += slot.nbytes
            if slot.has_gradient:
                parts[slot] = part
                state = {**self.state_of(slot), **(self._views(slot, part) if slot.filled else {})}
                lent[slot] = Lent(self._key(slot, opened), slot.group, state)
        self._stepper.lend(list(lent.values()))
        torch.autograd.graph.increment_version([slot.parameter for slot in lent])
        for slot, stepped in lent.items():
            self._harvest(slot, stepped, parts[slot])
            if slot.storage is not None:
                local = local_of(slot.parameter)
                slot.storage.note_stepped(local, local_of(stepped.key))

    def _views(self, slot: Slot, part: Tensor | None) -> dict[str, Tensor]:
        """The state tensors the step is to use, over the buffer or where they are kept."""
        if slot.record is None:
            return {}
        if part is not None:
            return slot.record.views(part)
        if not slot.windows:
            slot.show(slot.record.windows(self.state.store.window(slot.record.extent)))
        return slot.windows

    @staticmethod
    def _key(slot: Slot, opened: Tensor | None) -> Tensor:
        """What the step takes for the parameter: itself, or its values read from disk."""
        if slot.storage is None or opened is None:
            return slot.parameter
        local = slot.storage.part(local_of(slot.parameter), opened)
        stand_in = like(spec_of(slot.parameter), local)
        stand_in.grad = slot.parameter.grad
        return stand_in

    def _harvest(self, slot: Slot, stepped: Lent, part: Tensor | None) -> None:
        """Publish what the step left; what is not where it is kept goes there, or to ``part``."""
        state = stepped.state
        if stepped.is_settled:
            self.state.publish(slot, state)
        elif state:
            self.state.keep(slot, state, part)
        elif slot.filled:
            self._optimizer.state.get(slot.parameter, {}).clear()
            self.state.forget(slot)
