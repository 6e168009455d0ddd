"""One row on one rank: a stack of transformer-like blocks, stepped by either engine."""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import polyshard_sim

BLOCKS, WIDTH, HIDDEN, TOKENS, STEPS = 6, 512, 2048, 32, 3
ENGINES = ("polyshard", "FSDP2")
MIB = 1 << 20


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
    """The two large matrices of a transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

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
        model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    model.to("sim")
    for block in model:
        library.fully_shard(block, **settings)
    return library.fully_shard(model, **settings)


def measure(rank: int, size: int, name: str, engine: str) -> dict[str, Any]:
    """Some steps of the row ``name``; figures of the last one."""
    del size
    row, figures = ROWS[name], Figures()
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()  # of the row before
    model = sharded(row, engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator("cpu").manual_seed(rank)
    for _ in range(STEPS):
        torch.accelerator.synchronize()
        gc.collect()
        polyshard_sim.reset_counters()
        figures.at_rest = polyshard_sim.counters().allocated_bytes / MIB
        figures.forward = figures.backward = figures.peak = figures.reserved = 0.0
        totals = [0] * 5
        for micro in range(row.micro):
            model.set_requires_gradient_sync(micro == row.micro - 1)
            batch = torch.randn(TOKENS, WIDTH, generator=generator, device="cpu").to("sim")
            loss = model(batch).float().square().mean()
            figures.forward = max(figures.forward, _phase(figures, totals))
            loss.backward()
            figures.backward = max(figures.backward, _phase(figures, totals))
            figures.losses.append(loss.detach())
            del loss, batch
        optimizer.step()
        optimizer.zero_grad()
        _phase(figures, totals)
    figures.launches, figures.host_waits, figures.collectives = totals[:3]
    figures.collective_bytes, figures.host_bytes = totals[3:]
    figures.losses = [float(loss) for loss in figures.losses]
    return asdict(figures)


def _phase(figures: Figures, totals: list[int]) -> float:
    """The peak since the last call, in MiB; what was counted meanwhile is added to ``totals``."""
    seen = polyshard_sim.counters()
    counted = (
        seen.launches,
        seen.host_waits,
        seen.collectives,
        seen.collective_bytes,
        seen.bytes_to_device + seen.bytes_to_host,
    )
    totals[:] = [before + now for before, now in zip(totals, counted, strict=True)]
    peak = seen.peak_allocated_bytes / MIB
    figures.peak = max(figures.peak, peak)
    figures.reserved = max(figures.reserved, seen.peak_reserved_bytes / MIB)
    polyshard_sim.reset_counters()
    return peak
