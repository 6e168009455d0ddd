"""How much memory a training model keeps, in pages: no timing, no allocator in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from polyshard import fully_shard
from polyshard.engine.root import groups_of
from polyshard.memory.buffers import MappedBuffer
from polyshard.memory.pages import EXTENT_BYTES, PageRange, pages_can_move
from polyshard_testing import ranks

WIDTH = 1024
LAYERS = 4

mapped = pytest.mark.skipif(not pages_can_move(), reason="this kernel cannot move pages")


def ranges_of(model: nn.Module) -> tuple[list[PageRange], list[PageRange]]:
    """Where parameters are gathered to, and where gradients are."""
    gathered, reduced = [], []
    for group in groups_of(model):
        runtime = group.prepare()
        assert isinstance(runtime.buffer, MappedBuffer)
        gathered.append(runtime.buffer._range)
        totals = runtime.reducer._totals._mapped
        assert totals is not None, "gradients are not made of pages"
        reduced.append(totals._range)
    return gathered, reduced


def resident(ranges: list[PageRange]) -> int:
    return sum(sum(r.filled) for r in ranges) * EXTENT_BYTES


@mapped
@ranks(2)
def test_gradients_use_the_pages_of_freed_parameters(rank: int, size: int) -> None:
    """Kept until backward, parameters and gradients take what parameters alone take."""
    model = nn.Sequential(*[nn.Linear(WIDTH, 4 * WIDTH) for _ in range(LAYERS)])
    for index, layer in enumerate(model):
        model[index] = nn.Sequential(layer, nn.Linear(4 * WIDTH, WIDTH))
        fully_shard(model[index], reshard_after_forward=False)
    sharded: Any = fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1e-3)
    for _ in range(3):
        sharded(torch.ones(2, WIDTH)).square().mean().backward()
        gathered, reduced = ranges_of(sharded)
        needed = sum(r.extents for r in gathered) * EXTENT_BYTES
        assert resident(gathered) + resident(reduced) <= needed + EXTENT_BYTES * LAYERS
        assert resident(reduced) == sum(r.extents for r in reduced) * EXTENT_BYTES
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        sharded(torch.ones(2, WIDTH))
    assert resident(reduced) <= EXTENT_BYTES * LAYERS, "the next forward takes the pages back"
