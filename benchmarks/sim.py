"""Both engines on the simulated accelerator: memory by phase, launches, host waits, bytes.

    python -m benchmarks.sim [--rows fp32 bf16 ...] [--json OUT]

Simulated: kernels are the CPU's, and the allocator follows CUDA's rules. Bytes and counts say what
the engines ask of a device; no time is measured. Needs polyshard-sim.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness import show, table
from benchmarks.result import save
from polyshard_testing import World

BLOCKS, WIDTH, HIDDEN, TOKENS, STEPS = 6, 512, 2048, 32, 3
ENGINES = ("polyshard", "FSDP2")
MIB = 1 << 20
COLUMNS = ("at_rest", "forward", "backward", "peak", "reserved", "launches", "host_waits")
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


@dataclass
class Figures:
    """Of the last step on rank 0; memory in MiB."""

    at_rest: float = 0.0
    """Allocated before the step, after ``zero_grad``."""
    forward: float = 0.0
    backward: float = 0.0
    peak: float = 0.0
    """Allocated at most, in forward, backward and the optimizer's step."""
    reserved: float = 0.0
    launches: int = 0
    host_waits: int = 0
    collectives: int = 0
    collective_bytes: int = 0
    host_bytes: int = 0
    """Copied between host and device."""
    losses: list[float] = field(default_factory=list)


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


def sharded(row: Row, engine: str) -> Any:
    """The model under ``engine``."""
    if engine == "FSDP2":
        import torch.distributed.fsdp as library
    else:
        import polyshard as library  # type: ignore[no-redef]
    shape = (row.replicas, row.ranks // row.replicas) if row.replicas > 1 else (row.ranks,)
    names = ("replicas", "shards")[-len(shape) :]
    settings: dict[str, Any] = {
        "mesh": init_device_mesh("sim", shape, mesh_dim_names=names),
        "reshard_after_forward": row.reshard,
    }
    if row.bf16:
        settings["mp_policy"] = library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if row.offload:
        settings["offload_policy"] = library.CPUOffloadPolicy()
    with torch.device("cpu"):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(WIDTH, HIDDEN) for _ in range(BLOCKS)))
    model.to("sim")
    for block in model:
        library.fully_shard(block, **settings)
    return library.fully_shard(model, **settings)


def train(rank: int, size: int, name: str, engine: str) -> dict[str, Any]:
    """Some steps of the row ``name`` on a rank; figures of the last one."""
    import polyshard_sim

    del size
    row, figures = ROWS[name], Figures()
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()  # of the row before
    model = sharded(row, engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator("cpu").manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        torch.accelerator.synchronize()
        gc.collect()
        polyshard_sim.reset_counters()
        figures = Figures(at_rest=polyshard_sim.counters().allocated_bytes / MIB)
        for micro in range(row.micro):
            model.set_requires_gradient_sync(micro == row.micro - 1)
            batch = torch.randn(TOKENS, WIDTH, generator=generator, device="cpu").to("sim")
            loss = model(batch).float().square().mean()
            figures.forward = max(figures.forward, _phase(figures))
            loss.backward()
            figures.backward = max(figures.backward, _phase(figures))
            losses.append(loss.detach())
            del loss, batch
        optimizer.step()
        optimizer.zero_grad()
        _phase(figures)
    figures.losses = [float(loss) for loss in losses]
    return asdict(figures)


def _phase(figures: Figures) -> float:
    """The peak since the last call, in MiB; what was counted meanwhile is added to ``figures``."""
    import polyshard_sim

    seen = polyshard_sim.counters()
    for name in ("launches", "host_waits", "collectives", "collective_bytes"):
        setattr(figures, name, getattr(figures, name) + getattr(seen, name))
    figures.host_bytes += seen.bytes_to_device + seen.bytes_to_host
    peak = seen.peak_allocated_bytes / MIB
    figures.peak = max(figures.peak, peak)
    figures.reserved = max(figures.reserved, seen.peak_reserved_bytes / MIB)
    polyshard_sim.reset_counters()
    return peak


def measure(names: Iterable[str] = ROWS) -> dict[str, Any]:
    """Figures of rank 0, by row and engine."""
    found: dict[str, Any] = {}
    with ExitStack() as worlds:
        started: dict[int, World] = {}
        for name in names:
            size = ROWS[name].ranks
            if size not in started:
                world = World(size, device="sim", start_method="spawn")
                started[size] = worlds.enter_context(closing(world))
            world = started[size]
            found[name] = {e: world.run(train, name, e, timeout=600)[0] for e in ENGINES}
    return {"simulated": True, "rows": found}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The table of the page."""
    heads = ["row", *(c.replace("_", " ") for c in SHOWN), "forward and backward / FSDP2", "losses"]
    yield from table(heads, (_cells(*item) for item in found["rows"].items()))


def _cells(name: str, row: dict[str, dict[str, Any]]) -> list[str]:
    ours, theirs = (row[engine] for engine in ENGINES)
    cells = [" / ".join(_text(side[c]) for side in (ours, theirs)) for c in SHOWN]
    ratio = max(ours["forward"], ours["backward"]) / max(theirs["forward"], theirs["backward"])
    same = "bitwise" if ours["losses"] == theirs["losses"] else "differ"
    return [f"`{name}`", *cells, f"{ratio:.3f}", same]


def _text(value: int | float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    found = measure(options.rows)
    show(found)
    if options.json:
        save(found, options.json)


if __name__ == "__main__":
    main()
