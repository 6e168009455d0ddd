"""On one accelerator: a step of Llama-3-8B-sized layers, its launches and its memory.

    python -m benchmarks gpu [--layers 4] [--json OUT]      (needs CUDA)
    python -m benchmarks gpu --backend nccl --ranks 1
    python -m benchmarks gpu --backend nccl --ranks 2 --layers 2   (ranks may share a GPU)
    python -m benchmarks gpu --quick                        (on the CPU: shows that it runs)

With the fake process group this is rank 0 of 64, and transfers return at once (host/silent.py):
what is left is compute and what the engine adds to it. Columns that need CUDA are empty without it.
Sizes are those of the model's published ``config.json``
(https://huggingface.co/meta-llama/Meta-Llama-3-8B). Transfers to and from the host are measured by
``polyshard plan --measure``, codecs by ``benchmarks.quantized.codec``.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import harness
from benchmarks.harness import (
    LIBRARIES,
    MIB,
    Found,
    Training,
    bf16,
    in_turns,
    run_alone,
    run_ranks,
    seconds,
    sharded,
)
from benchmarks.host.launches import count
from benchmarks.host.silent import silent_group
from polyshard_demo.model import LanguageModel, ModelSettings

LLAMA = ModelSettings(width=4096, heads=32, key_heads=8, hidden=14336, vocabulary=128256, layers=32)
TINY = ModelSettings(width=64, heads=4, key_heads=2, hidden=224, vocabulary=512, layers=2)


@dataclass(frozen=True)
class Case(harness.Case, device="cpu", backend="fake", layers=2, tokens=16, steps=3, warmup=1):
    """What is measured. ``tokens`` is the length of the one sequence of a batch."""

    device: str = "cuda"
    backend: str = "fake"
    ranks: int = 64
    layers: int = 4
    tokens: int = 2048
    steps: int = 10
    warmup: int = 3

    @property
    def model(self) -> ModelSettings:
        """Small on the CPU."""
        shape = TINY if self.device == "cpu" else LLAMA
        return replace(shape, layers=self.layers, sequence=self.tokens)

    def measure(self) -> Found:
        """A table, and what it is about."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise SystemExit("torch sees no CUDA device here; --quick shows that the script runs")
        cpu = f"the CPU ({platform.machine()}), at sizes that mean nothing"
        return {
            "device": torch.cuda.get_device_name() if self.device == "cuda" else cpu,
            "model": f"{self.layers} layers of width {self.model.width}, {self.tokens} tokens",
            "group": f"{self.backend}, {self.ranks} ranks",
            "settings": asdict(self),
            "tables": {"Step, bf16 compute, fp32 reduction": self._rows()},
        }

    def _rows(self) -> list[Found]:
        """Peaks are of fresh processes: the first engine there takes cuBLAS's memory."""
        peaks = {name: self._fresh(_peak, name, self) for name in LIBRARIES}
        rows: list[Found] = self._fresh(step_table, self, peaks)
        return rows

    def _fresh(self, work: Callable[..., Any], *args: Any) -> Any:
        """What ``work`` returns in a process of its own, or on rank 0 of as many as there are."""
        if self.backend == "fake" or self.ranks == 1:
            return run_alone(work, *args)
        return run_ranks(self.ranks, work, *args, device=self.device)


def step_table(case: Case, peaks: dict[str, int | None]) -> list[Found]:
    """Time in turns; launches of one step."""
    device = torch.device(case.device)
    with process_group(case) as mesh:
        steps = {name: trained(name, case, mesh).step for name in LIBRARIES}
        ways = {name: lambda _, step=step: seconds(step, device) for name, step in steps.items()}
        samples = in_turns(ways, case.steps, case.warmup)
        counts = {name: count(step) for name, step in steps.items()}
    rows: list[Found] = [
        {
            "engine": name,
            "step ms": 1e3 * median(samples[name]),
            "launches": counted.launches,
            "copy kernels": counted.copy_kernels,
            "copy ms": _times(1e3, counted.copy_seconds),
            "device ms": _times(1e3, counted.device_seconds),
            "copying operators": counted.copy_operators,
            "peak allocated MiB": _times(1 / MIB, peaks[name]),
        }
        for name, counted in counts.items()
    ]
    ours, theirs = rows
    ratios = {k: ours[k] / theirs[k] if ours[k] and theirs[k] else None for k in list(ours)[1:]}
    return [*rows, {"engine": "ratio", **ratios}]


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


@contextmanager
def process_group(case: Case) -> Iterator[DeviceMesh]:
    if case.backend == "fake":
        with silent_group(case.ranks):
            yield init_device_mesh(case.device, (case.ranks,))
        return
    if dist.is_initialized():  # on fresh ranks
        torch.set_default_device(None)
        yield init_device_mesh(case.device, (case.ranks,))
        return
    dist.init_process_group(case.backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(case.device, (1,))
    finally:
        dist.destroy_process_group()


def trained(engine: str, case: Case, mesh: DeviceMesh) -> Training:
    """A sharded Llama in bf16, reduced in fp32, with AdamW.

    It is built on the meta device: no rank of 64 could hold what all of them do.
    """
    library = LIBRARIES[engine]
    with torch.device("meta"):
        model: Any = LanguageModel(case.model)
    sharded(model, model.blocks, library.fully_shard, mesh=mesh, **bf16(library))
    model.to_empty(device=case.device)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.rotary.reset_parameters()
        for parameter in model.parameters():
            parameter.to_local().normal_(std=0.02)
    tokens = torch.randint(case.model.vocabulary, (1, case.tokens), device=case.device)

    def loss() -> torch.Tensor:
        logits = model(tokens)[:, :-1].flatten(0, 1).float()
        return F.cross_entropy(logits, tokens[:, 1:].flatten())

    return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True), loss)


def _peak(name: str, case: Case) -> int | None:
    """Bytes torch's CUDA allocator had handed out at most."""
    if case.device != "cuda":
        return None
    with process_group(case) as mesh:
        training = trained(name, case, mesh)
        training.step()  # makes the optimizer's state
        torch.cuda.reset_peak_memory_stats()
        training.step()
        return torch.cuda.max_memory_allocated()
