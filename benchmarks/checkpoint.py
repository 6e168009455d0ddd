"""How long training stands still for a save that is written beside it.

    python -m benchmarks checkpoint

On each turn the same ranks copy their shards of weights and moments into memory that is there
already (the least any such save can cost), then start an asynchronous save of polyshard's, then one
of ``torch.distributed.checkpoint``, collecting the state included; each save has ended before the
next begins, and its own time is noted. DCP runs as it does by default, and with a ``DefaultStager``
that keeps its memory from save to save.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict

from benchmarks import harness
from benchmarks.harness import Found, OnRanks, Training
from polyshard_checkpoint import Checkpoints, TrainingState

MEMCPY = "memcpy"
Begin = Callable[[int], Callable[[], object]]
"""Begins a save; what it returns waits for the end."""


@dataclass(frozen=True)
class Case(OnRanks, width=64, layers=2, turns=1):
    """What is measured."""

    width: int = 2048
    layers: int = 8
    turns: int = 7

    def on_rank(self) -> Found:
        """Medians in seconds, the slowest rank's of every turn."""
        training = harness.linear_training(self.width, self.layers, rows=2)
        training.step()
        names = [tempfile.mkdtemp(prefix="polyshard-bench-")]
        dist.broadcast_object_list(names)
        folder = Path(names[0])
        try:
            with Checkpoints(folder / "ours", keep=1) as checkpoints:
                begins = _begins(training, checkpoints, folder)
                ways = {name: partial(_timed, begin) for name, begin in begins.items()}
                found = harness.in_turns(ways, self.turns)
        finally:
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folder)
        stalls, ends = (
            harness.median_of({name: [t[part] for t in turns] for name, turns in found.items()})
            for part in (0, 1)
        )
        return {
            "ranks": self.ranks,
            "shard_bytes": harness.nbytes(training.shards()),
            "stall_seconds": stalls,
            "complete_seconds": ends,
            "stall_over_memcpy": {name: stall / stalls[MEMCPY] for name, stall in stalls.items()},
        }


def _begins(training: Training, checkpoints: Checkpoints, folder: Path) -> dict[str, Begin]:
    model, optimizer, own = training.model, training.optimizer, training.shards()
    copies = [torch.empty_like(shard).zero_() for shard in own]
    group = dist.new_group(backend="gloo")
    options = dict.fromkeys(("use_pinned_memory", "use_shared_memory"), False)
    options |= dict.fromkeys(("use_async_staging", "use_non_blocking_copy"), False)
    kept = DefaultStager(StagingOptions(**options))

    def memcpy(_: int) -> Callable[[], object]:
        for copy, shard in zip(copies, own, strict=True):
            copy.copy_(shard)
        return lambda: None

    def ours(turn: int) -> Callable[[], object]:
        return checkpoints.save_async(turn, TrainingState(model, [optimizer], random=False)).wait

    def theirs(stager: DefaultStager | None, _: int) -> Callable[[], object]:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        saving: Any = dcp.async_save(
            state, checkpoint_id=folder / "dcp", process_group=group, async_stager=stager
        )
        wait: Callable[[], object] = getattr(saving, "upload_completion", saving).result
        return wait

    dcps = {"dcp": partial(theirs, None), "dcp, memory kept": partial(theirs, kept)}
    return {MEMCPY: memcpy, "polyshard": ours, **dcps}


def _timed(begin_save: Begin, number: int) -> list[float]:
    """Seconds that training stood still, and until the save was complete."""
    begin = time.perf_counter()
    wait = begin_save(number)
    stall = time.perf_counter() - begin
    wait()
    return harness.slowest(stall, time.perf_counter() - begin)
