"""Both engines on the simulated accelerator: memory by phase, launches, host waits, bytes.

    python -m benchmarks.sim [--rows fp32 bf16 ...] [--json OUT]

Simulated: kernels are the CPU's, and the allocator follows CUDA's rules. Bytes and counts say what
the engines ask of a device; no time is measured. Needs polyshard-sim.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import polyshard
from benchmarks import harness
from benchmarks.harness import MIB, Found, bf16, command, table
from polyshard_testing import World

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

    def measure(self) -> Found:
        """Figures of rank 0, by row and engine."""
        found: Found = {}
        for ranks in {ROWS[name].ranks for name in self.rows}:
            with closing(World(ranks, device="sim", start_method="spawn")) as world:
                for name in self.rows:
                    if ROWS[name].ranks == ranks:
                        runs = {e: world.run(train, name, e, timeout=600)[0] for e in LIBRARIES}
                        found[name] = runs
        return {"simulated": True, "rows": {name: found[name] for name in self.rows}}


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
    names = ("replicas", "shards")[-len(mesh) :]
    placed = init_device_mesh("sim", mesh, mesh_dim_names=names)
    return harness.sharded(model.to("sim"), model, library.fully_shard, mesh=placed, **keywords)


def _trained(row: Row, engine: str) -> Any:
    library = LIBRARIES[engine]
    mesh = (row.replicas, row.ranks // row.replicas) if row.replicas > 1 else (row.ranks,)
    keywords: dict[str, Any] = bf16(library) if row.bf16 else {}
    if row.offload:
        keywords["offload_policy"] = library.CPUOffloadPolicy()
    return sharded(library, mesh, reshard_after_forward=row.reshard, **keywords)


def train(rank: int, size: int, name: str, engine: str) -> Found:
    """Some steps of the row ``name`` on a rank; figures of the last one, memory in MiB."""
    import polyshard_sim

    del size
    row, figures = ROWS[name], dict[str, float]()
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()  # of the row before
    model = _trained(row, engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator("cpu").manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        torch.accelerator.synchronize()
        gc.collect()
        polyshard_sim.reset_counters()
        figures = {"at_rest": polyshard_sim.counters().allocated_bytes / MIB}
        for micro in range(row.micro):
            model.set_requires_gradient_sync(micro == row.micro - 1)
            batch = torch.randn(TOKENS, WIDTH, generator=generator, device="cpu").to("sim")
            loss = model(batch).float().square().mean()
            _end_of("forward", figures)
            loss.backward()
            _end_of("backward", figures)
            losses.append(loss.detach())
            del loss, batch
        optimizer.step()
        optimizer.zero_grad()
        _end_of("optimizer", figures)
    return {**figures, "losses": [float(loss) for loss in losses]}


def _end_of(phase: str, figures: dict[str, float]) -> None:
    """Add what was counted since the last call; peaks are the largest so far."""
    import polyshard_sim

    seen = polyshard_sim.counters()
    for name in ("launches", "host_waits", "collectives", "collective_bytes"):
        figures[name] = figures.get(name, 0) + getattr(seen, name)
    moved = seen.bytes_to_device + seen.bytes_to_host
    figures["host_bytes"] = figures.get("host_bytes", 0) + moved
    allocated, reserved = seen.peak_allocated_bytes / MIB, seen.peak_reserved_bytes / MIB
    for name, peak in ((phase, allocated), ("peak", allocated), ("reserved", reserved)):
        figures[name] = max(figures.get(name, 0.0), peak)
    polyshard_sim.reset_counters()


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


if __name__ == "__main__":
    command(Case(), __doc__)
