"""Which parameters are stepped together, and what is known of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from polyshard.plugins.seams import local_of
from polyshard_offload.optimizer.pipeline import Job
from polyshard_offload.optimizer.records import Record
from polyshard_offload.optimizer.spent import SpentGradient
from polyshard_offload.shards.disk_storage import DiskStorage

NO_GROUP = -1


@dataclass(eq=False)
class Slot:
    """One parameter of the optimizer.

    ``group`` indexes ``param_groups``, or is :data:`NO_GROUP`; ``weight`` is the state in bytes
    that the largest shard on any rank has. ``record`` is where its state is kept, if it is;
    ``filled`` says that there are values, of which ``optimizer.state`` shows ``windows`` among
    ``shown`` entries. ``storage`` holds the parameter itself when it rests on disk. Nothing moves
    for one that is ``in_runs``: it is stepped where it and its state are. ``is_stateless`` says
    that no step makes anything to be kept.
    """

    parameter: Tensor
    group: int
    weight: int
    offloaded: bool
    storage: DiskStorage | None = None
    record: Record | None = None
    filled: bool = False
    windows: dict[str, Tensor] = field(default_factory=dict)
    shown: int = 0
    in_runs: bool = False
    is_stateless: bool = False
    _places: tuple[tuple[str, Tensor, int], ...] = ()

    @property
    def is_member(self) -> bool:
        """Whether the optimizer has the parameter; state outlives that, as without offload."""
        return self.group != NO_GROUP

    def show(self, windows: dict[str, Tensor]) -> None:
        """``windows`` on the record are what the user sees from now on."""
        self.windows = windows
        self._places = tuple((n, w, local_of(w).data_ptr()) for n, w in windows.items())

    def is_shown(self, state: Mapping[str, Any]) -> bool:
        """Whether ``state``, which the user sees, is still the windows on what is kept.

        Writes through them need not be noticed: they change what is kept.
        """
        return len(state) == self.shown and all(
            state.get(name) is window and local_of(window).data_ptr() == address
            for name, window, address in self._places
        )

    @property
    def nbytes(self) -> int:
        """Bytes of buffer its state takes."""
        return self.record.extent.nbytes if self.record is not None else 0

    @property
    def has_gradient(self) -> bool:
        """Whether a step changes it; one that a step in backward used does not count."""
        gradient = self.parameter.grad
        return gradient is not None and not isinstance(gradient, SpentGradient)


@dataclass(frozen=True)
class Chunk:
    """Slots stepped together; their records fill one buffer, in order."""

    key: int
    slots: tuple[Slot, ...]

    @property
    def storage(self) -> DiskStorage | None:
        """Where the parameters rest on disk; the same for all slots."""
        return self.slots[0].storage

    @property
    def is_due(self) -> bool:
        """Whether a step changes anything here."""
        return any(slot.has_gradient for slot in self.slots)

    def job(self) -> Job:
        """What the pipeline has to move."""
        kept = [s for s in self.slots if s.record is not None and s.nbytes]
        return Job(
            key=self.key,
            extents=tuple(s.record.extent for s in kept if s.record is not None),
            reads=any(s.filled for s in kept),
        )


def plan_chunks(slots: Sequence[Slot], chunk_bytes: int) -> list[Chunk]:
    """Cut ``slots`` into chunks of at most ``chunk_bytes`` of state, or of one parameter.

    Parameters of one shard on disk follow each other, and a chunk keeps to one shard. Cuts follow
    from weights, so all ranks step parameters in one order: an optimizer may communicate.
    """
    rank = {id(storage): i for i, storage in reversed(list(enumerate(s.storage for s in slots)))}
    chunks: list[Chunk] = []
    taken: list[Slot] = []
    nbytes = 0
    for slot in sorted(slots, key=lambda s: rank[id(s.storage)] if s.storage else 0):
        full = nbytes + slot.weight > chunk_bytes
        if taken and (full or slot.storage is not taken[0].storage):
            chunks.append(Chunk(len(chunks), tuple(taken)))
            taken, nbytes = [], 0
        taken.append(slot)
        nbytes += slot.weight
    if taken:
        chunks.append(Chunk(len(chunks), tuple(taken)))
    return chunks
