"""Speed of the block formats against a plain copy, and their error on three kinds of values.

    python -m benchmarks.quantized.codec [--mib 64] [--threads 1] [--device cpu]

Times are medians of turns in which the copy and every format take part, so that the ratios hold on
a busy machine. Errors are relative, of 2-norms, of one round trip. Needs polyshard-quantized.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from torch import Tensor

from benchmarks.clock import Work, seconds
from polyshard.sharding.layout import ParameterShape, plan_layout
from polyshard_quantized import (
    BlockFormat,
    Int4Block,
    Int8Block,
    format_named,
    format_names,
    round_trip,
)
from polyshard_quantized.layout.payload import plan_payload
from polyshard_quantized.transfers.gather import BoundGather
from polyshard_quantized.workspace import Workspace

WIDTH = 4096
FORMATS: tuple[BlockFormat, ...] = tuple(map(format_named, format_names()))


def codec_of(form: BlockFormat, values: Tensor) -> tuple[Work, Work]:
    """Encoding and decoding of a parameter ``[rows, WIDTH]``, as a step does it."""
    layout = plan_layout([ParameterShape("w", tuple(values.shape))], 1, 4, 0)
    plan = plan_payload(layout, form, {}, frozenset(), values.dtype)
    codec = BoundGather(plan, Workspace())
    payload = torch.empty(plan.nbytes, dtype=torch.uint8, device=values.device)
    shard, payloads = values.view(-1), payload[None]
    regions = [torch.empty_like(shard)[None]]
    return lambda: codec.encode(shard, payload), lambda: codec.decode(payloads, regions)


def measure(mib: int, turns: int, device: torch.device) -> dict[str, float]:
    """Median milliseconds of a copy and of each format, by name."""
    values = torch.randn(mib * (1 << 20) // 4 // WIDTH, WIDTH, device=device)
    target = torch.empty_like(values)
    works: dict[str, Work] = {"copy": lambda: target.copy_(values)}
    for form in FORMATS:
        encode, decode = codec_of(form, values)
        works[f"{form} encode"], works[f"{form} decode"] = encode, decode
    samples: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(turns + 1):
        for name, work in works.items():
            spent = seconds(work, device)
            if turn:  # the first one faults memory in
                samples[name].append(spent * 1e3)
    return {name: statistics.median(spent) for name, spent in samples.items()}


def kinds() -> dict[str, Tensor]:
    """A million values of each of three distributions, by name."""
    torch.manual_seed(0)
    gaussian = torch.randn(256, WIDTH)
    outliers = gaussian * torch.where(torch.rand_like(gaussian) < 1e-3, 50.0, 1.0)
    student = torch.distributions.StudentT(3.0).sample(gaussian.shape)
    return {"gaussian": gaussian, "student-t(3)": student, "0.1 % outliers, 50x": outliers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = measure(options.mib, options.turns, torch.device(options.device))
    print(f"torch {torch.__version__}, {options.mib} MiB of fp32, {options.threads} thread(s)")
    print("| what | ms | x copy |\n|---|---|---|")
    for name, spent in found.items():
        print(f"| {name} | {spent:.1f} | {spent / found['copy']:.2f} |")
    values = kinds()
    print("\n| relative error |" + "".join(f" {name} |" for name in values))
    print("|---" * (1 + len(values)) + "|")
    for form in (*FORMATS, Int8Block(64), Int8Block(1024), Int4Block(256)):
        errors = ((round_trip(v, form) - v).norm() / v.norm() for v in values.values())
        print(f"| {form} |" + "".join(f" {float(e):.4f} |" for e in errors))


if __name__ == "__main__":
    main()
