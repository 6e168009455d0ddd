"""Both engines on an accelerator: memory by phase, launches, host waits.

    python -m benchmarks sim [--rows fp32 bf16 ...] [--json OUT]
    python -m benchmarks sim --device cuda          (ranks may share a GPU, see CONTRIBUTING.md)

On the simulated one kernels are the CPU's, the allocator follows CUDA's rules, and bytes sent are
counted. What is found says what the engines ask of a device; no time is measured.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import polyshard
from benchmarks import harness
from benchmarks.harness import MIB, Found, bf16, run_ranks, table
from benchmarks.host.launches import count

BLOCKS, WIDTH, HIDDEN, TOKENS, STEPS = 6, 512, 2048, 32, 3
LIBRARIES: dict[str, Any] = {"polyshard": polyshard, "FSDP2": fsdp}
SHOWN = ("forward", "peak", "reserved", "launches", "host_waits")


@dataclass(frozen=True)
class Row:
    """What is measured: sizes and settings that both engines take."""

    ranks: int = 2
    bf16: bool = False
    """Compute in bfloat16, reduce in float32."""
    reshard: bool | int = True
    micro: int = 1
    """Backwards of a step; the last one reduces."""
    replicas: int = 1
    offload: bool = False


ROWS = {
    "fp32": Row(),
    "fp32, kept": Row(reshard=False),
    "fp32, blocks of 2": Row(ranks=4, reshard=2),
    "bf16": Row(bf16=True),
    "bf16, kept": Row(bf16=True, reshard=False),
    "accumulation": Row(micro=2),
    "accumulation, bf16": Row(bf16=True, micro=2),
    "hsdp": Row(ranks=4, replicas=2),
    "hsdp, bf16": Row(ranks=4, replicas=2, bf16=True),
    "cpu offload": Row(offload=True),
}


@dataclass(frozen=True)
class Case(harness.Case, rows=("fp32",)):
    """Names of rows."""

    rows: tuple[str, ...] = tuple(ROWS)
    device: str = "sim"

    def measure(self) -> Found:
        """Figures of rank 0, by row and engine."""
        found: Found = {
            # On fresh processes: cuBLAS keeps memory of the first engine that asks it for some.
            name: {
                e: run_ranks(ROWS[name].ranks, train, name, e, device=self.device)
                for e in LIBRARIES
            }
            for name in self.rows
        }
        about: Found = (
            {"simulated": True}
            if self.device == "sim"
            else {"device": torch.cuda.get_device_name()}
        )
        return {**about, "rows": found}


class Block(nn.Module):
    """The norm and the two large matrices of a transformer's block."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Residual."""
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


def sharded(
    library: Any,
    mesh: tuple[int, ...] = (2,),
    sizes: tuple[int, int, int] = (BLOCKS, WIDTH, HIDDEN),
    **keywords: Any,
) -> Any:
    """Blocks on the device, each a unit, below a root; ``mesh`` is ``(replicas,) shards``."""
    layers, width, hidden = sizes
    with torch.device("cpu"):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(width, hidden) for _ in range(layers)))
    device = torch.get_default_device().type
    placed = _mesh(device, mesh)
    return harness.sharded(model.to(device), model, library.fully_shard, mesh=placed, **keywords)


@functools.cache
def _mesh(device: str, sizes: tuple[int, ...]) -> DeviceMesh:
    """One for all models: each has process groups, whose threads wake up all the time."""
    names = ("replicas", "shards")[-len(sizes) :]
    return init_device_mesh(device, sizes, mesh_dim_names=names)


def _trained(row: Row, engine: str) -> Any:
    library = LIBRARIES[engine]
    mesh = (row.replicas, row.ranks // row.replicas) if row.replicas > 1 else (row.ranks,)
    keywords: dict[str, Any] = bf16(library) if row.bf16 else {}
    if row.offload:
        keywords["offload_policy"] = library.CPUOffloadPolicy()
    return sharded(library, mesh, reshard_after_forward=row.reshard, **keywords)


def train(name: str, engine: str) -> Found:
    """Some steps of the row ``name`` on a rank; figures of the last one, memory in MiB."""
    device = torch.get_default_device()
    meter: Any = Simulated() if device.type == "sim" else Cuda()
    row, figures = ROWS[name], dict[str, float]()
    model = _trained(row, engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator("cpu").manual_seed(dist.get_rank())
    losses = []

    def phase(ended: str) -> None:
        for key, value in meter.end_of(ended).items():  # peaks are the largest so far
            old = figures.get(key, 0)
            is_peak = key in {ended, "peak", "reserved"}
            figures[key] = max(old, value) if is_peak else old + value

    def step() -> None:
        for micro in range(row.micro):
            model.set_requires_gradient_sync(micro == row.micro - 1)
            batch = torch.randn(TOKENS, WIDTH, generator=generator, device="cpu")
            loss = model(batch.to(device)).float().square().mean()
            phase("forward")
            loss.backward()
            phase("backward")
            losses.append(loss.detach())
            del loss, batch
        optimizer.step()
        optimizer.zero_grad()
        phase("optimizer")

    for _ in range(STEPS):
        torch.accelerator.synchronize()
        gc.collect()
        figures.clear()
        figures["at_rest"] = meter.at_rest()
        step()
    found = dict(figures)
    found |= meter.counts(step)
    return {**found, "losses": [float(loss) for loss in losses[: STEPS * row.micro]]}


class Simulated:
    """The simulated device counts for itself."""

    def at_rest(self) -> float:
        """MiB; peaks and counts begin anew."""
        import polyshard_sim

        polyshard_sim.reset_counters()
        return polyshard_sim.counters().allocated_bytes / MIB

    def end_of(self, phase: str) -> Found:
        """What was counted since the last call."""
        import polyshard_sim

        seen = polyshard_sim.counters()
        polyshard_sim.reset_counters()
        allocated = seen.peak_allocated_bytes / MIB
        return {
            phase: allocated,
            "peak": allocated,
            "reserved": seen.peak_reserved_bytes / MIB,
            "launches": seen.launches,
            "host_waits": seen.host_waits,
            "collectives": seen.collectives,
            "collective_bytes": seen.collective_bytes,
            "host_bytes": seen.bytes_to_device + seen.bytes_to_host,
        }

    def counts(self, step: Callable[[], None]) -> Found:
        """Known already."""
        del step
        return {}


class Cuda:
    """torch's allocator knows memory, its profiler launches, and its warnings waits of the host."""

    def at_rest(self) -> float:
        """MiB; peaks begin anew."""
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / MIB

    def end_of(self, phase: str) -> Found:
        """Peaks since the last call."""
        allocated = torch.cuda.max_memory_allocated() / MIB
        reserved = torch.cuda.max_memory_reserved() / MIB
        torch.cuda.reset_peak_memory_stats()
        return {phase: allocated, "peak": allocated, "reserved": reserved}

    def counts(self, step: Callable[[], None]) -> Found:
        """Of one step each."""
        launches = count(step).launches
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            step()
            torch.cuda.set_sync_debug_mode("default")
        return {"launches": launches, "host_waits": len(waits)}


def lines(found: Found) -> Iterator[str]:
    """The table of the page."""
    heads = ["row", *(c.replace("_", " ") for c in SHOWN), "forward and backward / FSDP2", "losses"]
    yield from table(heads, (_cells(*item) for item in found["rows"].items()))


def _cells(name: str, row: dict[str, Found]) -> list[str]:
    ours, theirs = (row[engine] for engine in LIBRARIES)
    cells = [" / ".join(_text(side[c]) for side in (ours, theirs)) for c in SHOWN]
    ratio = max(ours["forward"], ours["backward"]) / max(theirs["forward"], theirs["backward"])
    same = "bitwise" if ours["losses"] == theirs["losses"] else "differ"
    return [f"`{name}`", *cells, f"{ratio:.3f}", same]


def _text(value: int | float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)
