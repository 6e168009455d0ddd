"""Step time with native and with quantized communication, in turns on the same ranks.

    python -m benchmarks quantized.step [--width 1024] [--layers 8] [--tokens 16]
    python -m benchmarks quantized.step --link 1gbit      (root: two shaped namespaces)

Every variant is a sharded copy of the same model; in each turn each variant makes one step, so that
whatever else the machine does hits all equally. Ratios are to native fp32: the median over turns.
Processor time, gloo's threads included, says what a shared machine hides.
Needs polyshard-quantized.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.harness import MIB, Found, OnRanks, Training
from benchmarks.links import Host, linked, run_hosts
from polyshard import MixedPrecisionPolicy, stats
from polyshard_quantized import ErrorFeedback, Int4Block, Int8Block, QuantizedComm


@dataclass(frozen=True)
class Case(OnRanks, width=64, layers=2, turns=1):
    """What is measured; ``link`` is the rate between ranks, which share the loopback without."""

    width: int = 1024
    layers: int = 8
    tokens: int = 16
    turns: int = 9
    link: str = ""

    def measure(self) -> Found:
        """By variant: medians of wall and processor time, ratio to fp32, bytes of a step."""
        with linked(self.ranks, self.link) as hosts:
            found: Found = run_hosts(hosts, _measure, self)[0]
        return found


def variants() -> dict[str, dict[str, Any]]:
    """Keywords of ``fully_shard``, by what the model is called."""
    int4 = QuantizedComm(gradients=Int4Block(), error_feedback=ErrorFeedback())
    return {
        "fp32": {},
        "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        "int8 weights": {"plugins": [QuantizedComm()]},
        "int8": {"plugins": [QuantizedComm(gradients=Int8Block())]},
        "int8, int4 gradients": {"plugins": [int4]},
    }


def _measure(_: Host, case: Case) -> Found:
    def made(keywords: dict[str, Any]) -> Training:
        return harness.language_training(case, 4 * case.width, case.layers, "fused", **keywords)

    ways = {name: partial(_turn, made(keywords)) for name, keywords in variants().items()}
    found = harness.in_turns(ways, case.turns)
    base = [turn[0] for turn in found["fp32"]]
    return {
        name: {
            "ms": 1e3 * median(turn[0] for turn in turns),
            "x fp32": harness.paired([turn[0] for turn in turns], base),
            "CPU ms of rank 0": 1e3 * median(turn[1] for turn in turns),
            "MiB sent by a rank": turns[-1][2] / MIB,
        }
        for name, turns in found.items()
    }


def _turn(training: Training, number: int) -> tuple[float, float, int]:
    """Seconds, processor seconds and bytes sent of a step."""
    dist.barrier()
    before = stats(training.model).bytes_sent if number else 0
    worked = time.process_time()
    spent = harness.seconds(training.step)
    worked = time.process_time() - worked
    return spent, worked, stats(training.model).bytes_sent - before
