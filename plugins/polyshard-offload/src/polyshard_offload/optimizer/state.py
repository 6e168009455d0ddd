"""Which state is kept where, and what of it the user sees between steps.

[Note: edits]
``optimizer.state`` and ``optimizer.param_groups`` are the user's as well. Whatever was done to them
since the last step is taken over before the next: windows that were replaced, removed or pointed
elsewhere, entries that came, parameters that moved between groups, left or came. What was written
*through* a window needs nothing: it is in what is kept, which every step reads.

It is taken over as torch would: tensors that were put into the state are the state from then on
(the objects stay, over memory of the tier), and windows that were taken out keep their values, so
that they can be put back. That is why edited state gets a new place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from polyshard.plugins.seams import local_of, repointed
from polyshard_offload.optimizer.chunks import NO_GROUP, Chunk, Slot, plan_chunks
from polyshard_offload.optimizer.records import (
    Entry,
    Record,
    dtype_bytes,
    entries_of,
    largest_shape,
    predict_entries,
    record_bytes,
)
from polyshard_offload.resources import Resources
from polyshard_offload.tiers.host_memory import Slab, pages
from polyshard_offload.tiers.state_store import DiskStore, Extent
from polyshard_optimizers.stepping import Stepper


class OptimizerState:
    """The slots of one optimizer and the store of their records.

    ``optimizer.state`` of an offloaded parameter holds windows on its record, and counters and the
    like as they are.
    """

    def __init__(self, optimizer: Optimizer, stepper: Stepper, resources: Resources) -> None:
        """Reserve room for the state of every trainable parameter; move what is there already.

        Raises:
            StorageError: when there is not enough.
        """
        self._optimizer = optimizer
        self._stepper = stepper
        self._by_runs = stepper.by_runs
        self._resources = resources
        self._settings = resources.settings
        self.store = resources.state_store(self._settings.optimizer)
        self.slots: list[Slot] = []
        self.every_slot: dict[int, Slot] = {}
        """By parameter: also of those that left the optimizer, whose state it still has."""
        self._members: list[list[int]] = []
        self._chunks: list[Chunk] | None = None
        self.refresh()
        self.adopt_edits()

    @property
    def streams(self) -> bool:
        """Whether state passes through buffers; else steps use it where it is kept."""
        return isinstance(self.store, DiskStore) or self._settings.params == "device"

    # Slots ------------------------------------------------------------------------------------

    def _assign_slots(self) -> None:
        """Slots for the parameters the optimizer has now, in its order."""
        groups = self._optimizer.param_groups
        every = [(p, i) for i, group in enumerate(groups) for p in group["params"]]
        total = sum(p.numel() for p, _ in every)
        passed = 0
        for slot in self.slots:
            slot.group = NO_GROUP
        self.slots = []
        for parameter, index in every:
            chosen = passed < self._settings.fraction * total
            passed += parameter.numel()
            chosen = chosen and self._rests_beside(parameter)
            slot = self.every_slot.get(id(parameter)) or self._slot(parameter, index, chosen)
            slot.group = index
            self.every_slot[id(parameter)] = slot
            self.slots.append(slot)
        self._chunks = None

    def _rests_beside(self, parameter: Tensor) -> bool:
        """Whether ``parameter`` is where the tier takes state from and brings it to.

        With parameters off the device that is the host, and what the user has left on an
        accelerator is stepped there, with its state. On the meta device it is not known yet.
        """
        is_host = local_of(parameter).device.type in ("cpu", "meta")
        return is_host or self._settings.params == "device"

    def _slot(self, parameter: Tensor, index: int, chosen: bool) -> Slot:
        group = self._optimizer.param_groups[index]
        shape = largest_shape(parameter)
        largest = predict_entries(self._stepper, group, parameter, shape)
        guess = 2 * math.prod(shape) * parameter.itemsize
        weight = guess if largest is None else record_bytes(largest)
        slot = Slot(parameter, index, pages(weight), chosen)
        own = tuple(local_of(parameter).shape)
        entries = largest
        if own != shape:
            entries = (
                predict_entries(self._stepper, group, parameter, own) if math.prod(own) else ()
            )
        slot.is_stateless = entries == ()
        if chosen and parameter.requires_grad and entries:
            slot.record = Record(self._allocate(entries), entries)
        return slot

    def refresh(self) -> list[Chunk]:
        """The chunks, planned anew when parameters came, left, moved, or changed their state."""
        members = [list(map(id, group["params"])) for group in self._optimizer.param_groups]
        if members != self._members:
            self._members = members
            self._assign_slots()
        if self._settings.params == "disk":
            self._find_storages()
        if self._chunks is None or self._by_runs is not self._stepper.by_runs:
            self._by_runs = self._stepper.by_runs
            for slot in self.slots:
                slot.in_runs = self._may_run(slot)
            self._stepper.plan = None
            lent = [slot for slot in self.slots if not slot.in_runs]
            self._chunks = plan_chunks(lent, self._settings.chunk_bytes)
        return self._chunks

    def _may_run(self, slot: Slot) -> bool:
        """Whether a step needs nothing moved for ``slot``, and leaves nothing to be moved."""
        if not self._by_runs or self._settings.step_in_backward or slot.storage is not None:
            return False
        is_stateless = slot.is_stateless and slot.record is None  # settings may give it some later
        return not slot.offloaded or is_stateless or (slot.filled and not self.streams)

    def _find_storages(self) -> None:
        for slot in self.slots:
            address = local_of(slot.parameter).data_ptr()
            if slot.storage is None or not slot.storage.holds(address):
                storage = self._resources.storage_of(slot.parameter)
                if storage is not slot.storage:
                    slot.storage = storage
                    self._chunks = None

    # Keeping state ----------------------------------------------------------------------------

    def keep(self, slot: Slot, state: Mapping[str, Any], part: Tensor | None = None) -> None:
        """Move the tensors of ``state`` to the tier; leave windows on them with the rest.

        ``part`` is what the pipeline will write to the slot's extent after this.
        """
        entries = entries_of(state) if slot.offloaded else ()
        if not slot.offloaded:
            self.publish(slot, state)
            return
        before = slot.record
        self._place(slot, entries)
        if slot.record is not None:
            extent = slot.record.extent
            stays = before is not None and before.extent == extent
            kept = (part if stays else None) if self.streams else self.store.window(extent)
            packed = kept if slot.record is before else None
            if packed is None:  # some of the state may be in the old places
                packed = Slab.of_host(extent.nbytes, pinned=False).lease(0, extent.nbytes)
            for entry in entries:
                place, value = entry.view(packed), local_of(state[entry.name])
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)
            if kept is None:
                self.store.save([extent], packed)
            elif kept is not packed:
                kept.copy_(packed)
        self.publish(slot, state)

    def _place(self, slot: Slot, entries: tuple[Entry, ...]) -> None:
        """Give ``slot`` a record for ``entries``: its own if it fits, else a new one."""
        if (slot.record.entries if slot.record is not None else ()) == entries:
            return
        slot.show({})
        self._chunks = None
        if not entries:
            slot.record = None
            return
        extent = slot.record.extent if slot.record is not None else None
        if extent is None or extent.nbytes != pages(record_bytes(entries)):
            extent = self._allocate(entries)
        slot.record = Record(extent, entries)

    def _allocate(self, entries: tuple[Entry, ...]) -> Extent:
        return self.store.allocate(record_bytes(entries), dtype_bytes(entries))

    def publish(self, slot: Slot, state: Mapping[str, Any]) -> None:
        """Have ``optimizer.state`` show what is kept, in the dict that people may hold."""
        self._fill(slot, filled=True)
        held = self._optimizer.state.setdefault(slot.parameter, {})
        if slot.record is not None and not slot.windows:
            fresh = slot.record.windows(self.store.window(slot.record.extent))
            slot.show({n: repointed(held.get(n), window) for n, window in fresh.items()})
        shown = {**state, **slot.windows}
        slot.shown = len(shown)
        if held.keys() != shown.keys():
            held.clear()
        held.update(shown)

    def forget(self, slot: Slot) -> None:
        """There is no state for the parameter any more, until a step makes some."""
        self._fill(slot, filled=False)
        slot.shown = 0
        self._vacate(slot)

    def _fill(self, slot: Slot, *, filled: bool) -> None:
        if slot.filled is not filled:
            slot.filled = filled
            self._chunks = None

    def _vacate(self, slot: Slot) -> None:
        """Leave the place of a record that people may still hold windows on."""
        if slot.record is not None and slot.windows:
            self.store.release(slot.record.extent)
            slot.record = None
            slot.show({})

    def adopt_edits(self) -> None:
        """Take over what was done to ``optimizer.state``. See [Note: edits].

        Raises:
            StorageError: when there is no room for it.
        """
        for slot in self.every_slot.values():
            state = self._optimizer.state.get(slot.parameter)
            if not state:
                self.forget(slot)
            elif slot.offloaded and not slot.is_shown(state):
                self._vacate(slot)
                self.keep(slot, dict(state))

    def adopt_loaded(self) -> None:
        """Move to the tier what ``load_state_dict`` left in ``optimizer.state``, as a copy."""
        self.refresh()
        every = self._optimizer.state
        for slot in self.every_slot.values():
            state = every.get(slot.parameter)
            if state and slot.offloaded and not slot.is_shown(state):
                every[slot.parameter] = {}
                self._vacate(slot)
                self.keep(slot, state)
        self.adopt_edits()
