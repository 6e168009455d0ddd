"""Chunks of optimizer state in buffers on an accelerator: a thread moves them, streams order it."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import torch
from offload_steps import Threads
from torch import Tensor

from polyshard_offload.optimizer.pipeline import Job, Pipeline
from polyshard_offload.tiers.state_store import Extent
from polyshard_testing.streams import recorded

WIDTH, CHUNKS = 8, 5


def test_chunks_are_moved_behind_what_used_their_buffers() -> None:
    """Copies of a thread never meet a step's kernels, wherever either of them is launched."""
    with recorded(1) as recorder:
        module, where = recorder.module, set()
        kept = torch.arange(WIDTH * CHUNKS, dtype=torch.uint8)
        recorder.is_host_memory(kept.data_ptr(), kept.nbytes)

        class Kept:
            """A tier whose copies the host does not wait for."""

            def load(self, extents: Sequence[Extent], target: Tensor) -> None:
                where.add(module.current)
                target.copy_(self._part(extents), non_blocking=True)

            def save(self, extents: Sequence[Extent], source: Tensor) -> None:
                where.add(module.current)
                self._part(extents).copy_(source, non_blocking=True)

            def _part(self, extents: Sequence[Extent]) -> Tensor:
                return kept[extents[0].offset : extents[0].offset + WIDTH]

        def visit(index: int, buffer: Tensor) -> None:
            buffer.add_(1)

        executor = "polyshard_offload.optimizer.pipeline.ThreadPoolExecutor"
        threads = mock.patch(executor, side_effect=lambda *a, **k: Threads(recorder))
        jobs = [Job(key, (Extent(key * WIDTH, WIDTH),)) for key in range(CHUNKS)]
        side = module.Stream()
        with threads:
            pipeline = Pipeline(Kept(), torch.device("cpu"), 2)  # type: ignore[arg-type]
            with module.stream(side):
                for _ in range(2):
                    pipeline.run(jobs, visit)
        recorder.host_uses(kept, "a checkpoint", writes=False)
        assert recorder.races == []
        assert torch.equal(kept, torch.arange(WIDTH * CHUNKS, dtype=torch.uint8) + 2)
    assert len(where) == 2
    assert not where & {"compute", side.name}
