"""On one accelerator: a step of Llama-3-8B-sized layers, host transfers, and codecs.

    python -m benchmarks.gpu [--layers 4] [--json OUT]      (needs CUDA)
    python -m benchmarks.gpu --backend nccl --ranks 1
    python -m benchmarks.gpu --tiny                         (on the CPU: shows that it runs)

With the fake process group this is rank 0 of 64, and transfers return at once (host/silent.py):
what is left is compute and what the engine adds to it. Columns that need CUDA say so without it.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.harness import in_turns, seconds, sharded, show
from benchmarks.host.launches import count
from benchmarks.host.silent import silent_group
from benchmarks.host.transfers import host_transfers
from benchmarks.llama import Llama, LlamaSettings
from benchmarks.quantized.codec import speeds
from benchmarks.result import save
from benchmarks.step.engines import library

ENGINES = ("polyshard", "torch")
Table = list[dict[str, Any]]


@dataclass(frozen=True)
class Settings:
    """What is measured. ``tokens`` is the length of the one sequence of a batch."""

    device: str = "cuda"
    backend: str = "fake"
    ranks: int = 64
    model: LlamaSettings = field(default_factory=lambda: LlamaSettings(layers=4))
    tokens: int = 2048
    steps: int = 10
    warmup: int = 3
    mib: int = 256
    matmul_size: int = 8192

    def __post_init__(self) -> None:
        """One process can be one rank only, of a group that is not faked.

        Raises:
            ValueError: for more of them.
        """
        if self.backend != "fake" and self.ranks != 1:
            raise ValueError(f"one process is one rank of '{self.backend}', not {self.ranks}")

    @classmethod
    def default(cls, *, tiny: bool) -> Settings:
        """Sizes of the real thing, or of a few seconds on a CPU."""
        if not tiny:
            return cls()
        model = LlamaSettings(64, 4, 2, 224, 512, layers=2)
        return cls("cpu", model=model, tokens=16, steps=3, warmup=1, mib=1, matmul_size=128)


def has_device() -> bool:
    return torch.cuda.is_available()


class Trainee:
    """A sharded Llama in bf16, reduced in fp32, with AdamW."""

    def __init__(self, engine: str, settings: Settings, mesh: DeviceMesh) -> None:
        """Meta first: no rank of 64 could hold what all of them do."""
        fully_shard, policy = library(engine)
        mixed = policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        with torch.device("meta"):
            self.model: Any = Llama(settings.model)
        sharded(self.model, self.model.blocks, fully_shard, mesh=mesh, mp_policy=mixed)
        self.model.to_empty(device=settings.device)
        with torch.no_grad():
            parameter: Any  # a DTensor
            for parameter in self.model.parameters():
                parameter.to_local().normal_(std=0.02)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        shape = (1, settings.tokens)
        self.tokens = torch.randint(settings.model.vocabulary, shape, device=settings.device)

    def step(self) -> None:
        logits: Tensor = self.model(self.tokens)
        F.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), self.tokens[:, 1:].flatten()
        ).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@contextmanager
def process_group(settings: Settings) -> Iterator[DeviceMesh]:
    if settings.backend == "fake":
        with silent_group(settings.ranks):
            yield init_device_mesh(settings.device, (settings.ranks,))
        return
    dist.init_process_group(settings.backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(settings.device, (1,))
    finally:
        dist.destroy_process_group()


def step_table(settings: Settings) -> Table:
    """Time in turns; launches of one step; the allocator's peak, one engine at a time."""
    with process_group(settings) as mesh:
        peaks = {name: _peak(name, settings, mesh) for name in ENGINES}
        trainees = {name: Trainee(name, settings, mesh) for name in ENGINES}
        device = torch.device(settings.device)
        ways = {n: lambda _, step=t.step: seconds(step, device) for n, t in trainees.items()}
        samples = in_turns(ways, settings.steps, settings.warmup)
        counts = {name: count(trainee.step) for name, trainee in trainees.items()}
    rows = [_step_row(name, samples[name], counts[name], peaks[name]) for name in ENGINES]
    return [*rows, _ratio_row(*rows)]


def _step_row(name: str, samples: list[float], counts: Any, peak: int | None) -> dict[str, Any]:
    def milli(value: float | None) -> float | None:
        return None if value is None else 1e3 * value

    return {
        "engine": name,
        "step ms": 1e3 * statistics.median(samples),
        "launches": counts.launches,
        "copy kernels": counts.copy_kernels,
        "copy ms": milli(counts.copy_seconds),
        "device ms": milli(counts.device_seconds),
        "copying operators": counts.copy_operators,
        "peak allocated MiB": None if peak is None else peak / 2**20,
    }


def _ratio_row(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"engine": "ratio"}
    for key in list(ours)[1:]:
        both = ours[key] is not None and theirs[key]
        row[key] = ours[key] / theirs[key] if both else None
    return row


def _peak(name: str, settings: Settings, mesh: DeviceMesh) -> int | None:
    """Bytes torch's CUDA allocator had handed out at most, above what others hold."""
    if settings.device != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    trainee = Trainee(name, settings, mesh)
    trainee.step()  # makes the optimizer's state
    torch.cuda.reset_peak_memory_stats()
    trainee.step()
    peak = torch.cuda.max_memory_allocated() - before
    del trainee
    gc.collect()
    return peak


def codec_table(settings: Settings) -> Table:
    """Encoding and decoding against a copy of the same bytes on the same device."""
    found = speeds(settings.mib, 9, torch.device(settings.device))
    nbytes = settings.mib * 2**20
    return [
        {"what": name, "ms": ms, "GB/s of fp32": nbytes / ms / 1e6, "x copy": ms / found["copy"]}
        for name, ms in found.items()
    ]


def measure(settings: Settings) -> dict[str, Any]:
    if settings.device == "cuda" and not has_device():
        raise SystemExit("torch sees no CUDA device here; --tiny shows that the script runs")
    model = settings.model
    return {
        "device": torch.cuda.get_device_name() if settings.device == "cuda" else _cpu(),
        "model": f"{model.layers} layers of width {model.width}, {settings.tokens} tokens",
        "group": f"{settings.backend}, {settings.ranks} ranks",
        "settings": asdict(settings),
        "tables": {
            "Step, bf16 compute, fp32 reduction": step_table(settings),
            "Host transfers": host_transfers(settings.device, settings.mib, settings.matmul_size),
            "Codecs": codec_table(settings),
        },
    }


def _cpu() -> str:
    return f"the CPU ({platform.machine()}), at sizes that mean nothing"


def parse() -> tuple[Settings, Path | None]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small, and on the CPU")
    parser.add_argument("--layers", type=int, help="of the model")
    parser.add_argument("--tokens", type=int, help="of the sequence")
    parser.add_argument("--ranks", type=int, help="64 by default; 1 with a real backend")
    parser.add_argument("--backend", default="fake", choices=("fake", "nccl", "gloo"))
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    chosen = Settings.default(tiny=options.tiny)
    ranks = options.ranks or (chosen.ranks if options.backend == "fake" else 1)
    model = replace(chosen.model, layers=options.layers or chosen.model.layers)
    tokens = options.tokens or chosen.tokens
    settings = replace(chosen, model=model, tokens=tokens, backend=options.backend, ranks=ranks)
    return settings, options.json


def main() -> None:
    settings, path = parse()
    torch.set_num_threads(1)
    found = measure(settings)
    show(found)
    if path:
        save(found, path)


if __name__ == "__main__":
    main()
