"""Chunks: every parameter once, in an order all ranks share, within the size asked for."""

from __future__ import annotations

import itertools
from typing import Any, cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from polyshard_offload.optimizer.chunks import Slot, plan_chunks
from polyshard_offload.optimizer.records import Entry, Record, entries_of, record_bytes
from polyshard_offload.tiers.state_store import Extent, merged

STORAGES = [cast(Any, object()) for _ in range(3)]


@given(
    members=st.lists(st.tuples(st.integers(0, 300), st.sampled_from([None, 0, 1, 2]))),
    chunk_bytes=st.integers(1, 500),
)
def test_chunks_partition_the_slots(
    members: list[tuple[int, int | None]], chunk_bytes: int
) -> None:
    slots = [
        Slot(torch.empty(0), 0, weight, True, None if storage is None else STORAGES[storage])
        for weight, storage in members
    ]
    chunks = plan_chunks(slots, chunk_bytes)
    flat = [slot for chunk in chunks for slot in chunk.slots]
    assert sorted(map(id, flat)) == sorted(map(id, slots))
    for storage in (None, *STORAGES):
        mine = [s for s in slots if s.storage is storage]
        assert [s for s in flat if s.storage is storage] == mine  # order is kept
    for chunk in chunks:
        assert len({id(s.storage) for s in chunk.slots}) == 1
        assert len(chunk.slots) == 1 or sum(s.weight for s in chunk.slots) <= chunk_bytes
    assert [c.key for c in chunks] == list(range(len(chunks)))
    on_disk = [c.storage for c in chunks if c.storage is not None]
    changes = sum(a is not b for a, b in itertools.pairwise(on_disk))
    assert changes <= max(len({id(s) for s in on_disk}) - 1, 0)  # each storage is opened once


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), min_size=0, max_size=3),
            st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float64]),
        ),
        max_size=5,
    )
)
def test_records_keep_tensors_apart(kinds: list[tuple[list[int], torch.dtype]]) -> None:
    """Packed side by side, every tensor comes back; counters and empty tensors stay out."""
    state = {f"t{i}": (torch.rand(shape) * 100).to(dtype) for i, (shape, dtype) in enumerate(kinds)}
    entries = entries_of({**state, "step": torch.tensor(3.0), "flag": True})
    assert [e.name for e in entries] == [k for k, t in state.items() if t.ndim and t.numel()]
    part = torch.zeros(record_bytes(entries), dtype=torch.uint8)
    for entry in entries:
        entry.view(part).copy_(state[entry.name])
    found = Record(Extent(0, part.numel()), entries).views(part)
    assert all(torch.equal(found[e.name], state[e.name]) for e in entries)
    assert all(e.start % 64 == 0 for e in entries)


@given(st.lists(st.integers(0, 5), max_size=8))
def test_neighbours_are_one_transfer(pages: list[int]) -> None:
    offset, extents = 0, []
    for count in pages:
        extents.append(Extent(offset, count * 4096))
        offset += count * 4096
    assert merged(extents) == ([Extent(0, offset)] if offset else [])


def test_entries_are_values() -> None:
    """What was predicted is compared with what came."""
    one, other = (Entry("m", (2,), torch.float32, 0, None) for _ in range(2))
    assert one == other
