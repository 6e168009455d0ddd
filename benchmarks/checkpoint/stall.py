"""How long training stands still for a save that goes on beside it.

    python -m benchmarks.checkpoint.stall

On each turn the same ranks copy their shards of weights and moments into memory that is there
already (the least any such save can cost), then start an asynchronous save of polyshard's, then one
of ``torch.distributed.checkpoint``, collecting the state included; each save has ended before the
next begins, and its own time is noted. DCP runs as it does by default, and with a ``DefaultStager``
that keeps its memory from save to save.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor

import polyshard
from benchmarks.ranks import run_ranks
from benchmarks.result import save
from polyshard.checkpoint import Checkpoints, TrainingState

MEMCPY, OURS, DCP, DCP_KEPT = "memcpy", "polyshard", "dcp", "dcp, memory kept"
Timed = tuple[float, float]
"""Seconds that training stood still, and until the save was complete."""


def measure(ranks: int, width: int, layers: int, turns: int) -> dict[str, Any]:
    """Medians in seconds, the slowest rank's of every turn; rank 0's view of all."""
    found: dict[str, Any] = run_ranks(ranks, _measure, width, layers, turns)
    return found


def _measure(width: int, layers: int, turns: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, optimizer = _trained(width, layers)
    folder = Path(_from_first(tempfile.mkdtemp(prefix="polyshard-bench-")))
    stalls: dict[str, list[float]] = {}
    ends: dict[str, list[float]] = {}
    try:
        with Checkpoints(folder / "ours", keep=1) as checkpoints:
            ways = _ways(model, optimizer, checkpoints, folder)
            for turn in range(turns + 1):  # the first allocates
                for name, way in ways.items():
                    stall, end = _slowest(way(turn))
                    if turn:
                        stalls.setdefault(name, []).append(stall)
                        ends.setdefault(name, []).append(end)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
    shard = sum(tensor.nbytes for tensor in _shards(model, optimizer))
    medians = {name: statistics.median(values) for name, values in stalls.items()}
    return {
        "ranks": dist.get_world_size(),
        "shard_bytes": shard,
        "stall_seconds": medians,
        "complete_seconds": {name: statistics.median(values) for name, values in ends.items()},
        "stall_over_memcpy": {name: medians[name] / medians[MEMCPY] for name in medians},
    }


def _trained(width: int, layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model whose optimizer has its state."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    for layer in model:
        polyshard.fully_shard(layer)
    polyshard.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _ways(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoints: Checkpoints, folder: Path
) -> dict[str, Callable[[int], Timed]]:
    shards = _shards(model, optimizer)
    copies = [torch.empty_like(shard).zero_() for shard in shards]
    group = dist.new_group(backend="gloo")
    plain = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    kept = DefaultStager(plain)

    def memcpy(turn: int) -> Timed:
        begin = time.perf_counter()
        for copy, shard in zip(copies, shards, strict=True):
            copy.copy_(shard)
        seconds = time.perf_counter() - begin
        return seconds, seconds

    def ours(turn: int) -> Timed:
        state = TrainingState(model, [optimizer], random=False)
        return _timed(lambda: checkpoints.save_async(turn, state).wait)

    def theirs(turn: int, stager: DefaultStager | None) -> Timed:
        def begin() -> Callable[[], object]:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments}
            saving: Any = dcp.async_save(
                state, checkpoint_id=folder / "dcp", process_group=group, async_stager=stager
            )
            finished = getattr(saving, "upload_completion", saving)
            wait: Callable[[], object] = finished.result
            return wait

        return _timed(begin)

    return {
        MEMCPY: memcpy,
        OURS: ours,
        DCP: lambda turn: theirs(turn, None),
        DCP_KEPT: lambda turn: theirs(turn, kept),
    }


def _timed(begin_save: Callable[[], Callable[[], object]]) -> Timed:
    begin = time.perf_counter()
    wait = begin_save()
    stall = time.perf_counter() - begin
    wait()
    return stall, time.perf_counter() - begin


def _shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    values = [p.detach() for p in model.parameters()]
    values += [v for state in optimizer.state.values() for v in state.values() if v.ndim]
    return [v.to_local() if isinstance(v, DTensor) else v for v in values]


def _slowest(timed: Timed) -> Timed:
    found = torch.tensor(timed)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found[0]), float(found[1])


def _from_first(value: str) -> str:
    found: list[Any] = [value]
    dist.broadcast_object_list(found)
    return str(found[0])


def show(found: dict[str, Any]) -> None:
    print(f"{found['ranks']} ranks, {found['shard_bytes'] / 2**20:.0f} MiB a rank")
    for name, stall in found["stall_seconds"].items():
        print(
            f"{name:>16}: stands still {1e3 * stall:>7.1f} ms, "
            f"{found['stall_over_memcpy'][name]:.2f} of a memcpy; "
            f"complete after {1e3 * found['complete_seconds'][name]:.0f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    found = measure(options.ranks, options.width, options.layers, options.turns)
    show(found)
    if options.json:
        save(found, options.json)


if __name__ == "__main__":
    main()
