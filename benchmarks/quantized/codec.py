"""Speed of the block formats against a plain copy, and their error on three kinds of values.

    python -m benchmarks quantized.codec [--mib 64] [--threads 1] [--device cpu]

Times are medians of turns in which the copy and every format take part, so that the ratios hold on
a busy machine. Errors are relative, of 2-norms, of one round trip. Needs polyshard-quantized.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import MIB, Found, Work, in_turns, median_of, seconds
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


@dataclass(frozen=True)
class Case(harness.Case, mib=1, turns=1):
    """What is measured."""

    mib: int = 64
    threads: int = 1
    turns: int = 9
    device: str = "cpu"

    def measure(self) -> Found:
        """Milliseconds, also as so many copies, and errors by format and kind of values."""
        torch.set_num_threads(self.threads)
        found = speeds(self.mib, self.turns, torch.device(self.device))
        torch.manual_seed(0)
        gaussian = torch.randn(256, WIDTH)
        kinds = {
            "gaussian": gaussian,
            "student-t(3)": torch.distributions.StudentT(3.0).sample(gaussian.shape),
            "0.1 % outliers, 50x": gaussian
            * torch.where(torch.rand_like(gaussian) < 1e-3, 50.0, 1.0),
        }
        return {
            "ms": found,
            "x copy": {name: spent / found["copy"] for name, spent in found.items()},
            "relative error": {
                str(form): {
                    name: float((round_trip(v, form) - v).norm() / v.norm())
                    for name, v in kinds.items()
                }
                for form in (*FORMATS, Int8Block(64), Int8Block(1024), Int4Block(256))
            },
        }


def codec_of(form: BlockFormat, values: Tensor) -> tuple[Work, Work]:
    """Encoding and decoding of a parameter ``[rows, WIDTH]``, as a step does it."""
    layout = plan_layout([ParameterShape("w", tuple(values.shape))], 1, 4, 0)
    plan = plan_payload(layout, form, {}, frozenset(), values.dtype)
    codec = BoundGather(plan, Workspace())
    payload = torch.empty(plan.nbytes, dtype=torch.uint8, device=values.device)
    shard, payloads = values.view(-1), payload[None]
    regions = [torch.empty_like(shard)[None]]
    return lambda: codec.encode(shard, payload), lambda: codec.decode(payloads, regions)


def speeds(mib: int, turns: int, device: torch.device) -> dict[str, float]:
    """Median milliseconds of a copy and of each format, by name."""
    values = torch.randn(mib * MIB // 4 // WIDTH, WIDTH, device=device)
    target = torch.empty_like(values)
    works: dict[str, Work] = {"copy": lambda: target.copy_(values)}
    for form in FORMATS:
        encode, decode = codec_of(form, values)
        works[f"{form} encode"], works[f"{form} decode"] = encode, decode
    ways = {name: lambda _, work=work: 1e3 * seconds(work, device) for name, work in works.items()}
    return median_of(in_turns(ways, turns))  # the first one faults memory in
