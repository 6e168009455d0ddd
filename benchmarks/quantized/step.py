"""Step time with native and with quantized communication, in turns on the same ranks.

    python -m benchmarks.quantized.step [--width 1024] [--layers 8] [--tokens 16]
    python -m benchmarks.quantized.step --link 1gbit      (root: two shaped namespaces)

Every variant is a sharded copy of the same model; in each turn each variant makes one step, so that
whatever else the machine does hits all alike. Ratios are to native fp32: the median over turns.
Processor time, gloo's threads included, says what a shared machine hides.
Needs polyshard-quantized.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import (
    in_turns,
    language_model,
    loss_of,
    paired,
    run_ranks,
    seconds,
    sharded,
    table,
)
from benchmarks.quantized.network import shaped_link
from benchmarks.result import ROOT
from polyshard import MixedPrecisionPolicy, fully_shard, stats
from polyshard_quantized import ErrorFeedback, Int4Block, Int8Block, QuantizedComm

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
VARIANTS = ("fp32", "bf16", "int8 weights", "int8", "int8, int4 gradients")
Samples = dict[str, Any]


def keywords_for(variant: str) -> dict[str, Any]:
    feedback = ErrorFeedback() if variant == "int8, int4 gradients" else None
    plugins: dict[str, Callable[[], QuantizedComm]] = {
        "int8 weights": QuantizedComm,
        "int8": lambda: QuantizedComm(gradients=Int8Block()),
        "int8, int4 gradients": lambda: QuantizedComm(
            gradients=Int4Block(), error_feedback=feedback
        ),
    }
    if variant in plugins:
        return {"plugins": [plugins[variant]()]}
    return {"mp_policy": BF16} if variant == "bf16" else {}


class Trainee:
    """One variant of the model with its optimizer."""

    def __init__(self, variant: str, options: dict[str, int]) -> None:
        width, tokens = options["width"], options["tokens"]
        model = language_model(width, options["layers"], tokens, 4 * width)
        self.model = sharded(model, model.blocks, fully_shard, **keywords_for(variant))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.tokens = torch.randint(0, 256, (1, tokens + 1), generator=generator)

    def step(self) -> None:
        loss_of(self.model, self.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def turn(self, number: int) -> tuple[float, float, int]:
        """Seconds, processor seconds and bytes sent."""
        dist.barrier()
        before = stats(self.model).bytes_sent if number else 0
        worked = time.process_time()
        spent = seconds(self.step)
        return spent, time.process_time() - worked, stats(self.model).bytes_sent - before


def measure(options: dict[str, int]) -> Samples:
    """Seconds and processor seconds of every turn by variant, and bytes of a step."""
    trainees = {variant: Trainee(variant, options) for variant in VARIANTS}
    found = in_turns({name: each.turn for name, each in trainees.items()}, options["turns"])
    return {
        "seconds": {name: [turn[0] for turn in turns] for name, turns in found.items()},
        "busy": {name: [turn[1] for turn in turns] for name, turns in found.items()},
        "bytes": {name: turns[-1][2] for name, turns in found.items()},
    }


def measure_joined(rank: int, address: str, options: dict[str, int]) -> None:
    """Body of a rank in a namespace; rank 0 prints what it measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    found = measure(options)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(found))


def over_link(rate: str, options: dict[str, int]) -> Samples:
    with shaped_link(rate) as nodes:
        address = f"tcp://{nodes[0].address}:29513"
        ranks = []
        for rank, node in enumerate(nodes):
            words = ["--rank", str(rank), "--address", address, "--options", json.dumps(options)]
            interface = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": node.interface}
            ranks.append(
                subprocess.Popen(
                    node.command(sys.executable, "-m", "benchmarks.quantized.step", *words),
                    cwd=ROOT,
                    env={**os.environ, **interface},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        outputs = [process.communicate()[0] for process in ranks]
        if any(process.returncode for process in ranks):
            raise SystemExit("a rank failed; its error is above")
    found: Samples = json.loads(outputs[0].splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("width", 1024), ("layers", 8), ("tokens", 16), ("turns", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link", help="rate between two namespaces, such as 1gbit; needs root")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--options", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        measure_joined(given.rank, given.address, json.loads(given.options))
        return
    names = ("width", "layers", "tokens", "turns")
    options: dict[str, int] = {name: getattr(given, name) for name in names}
    found = (
        over_link(given.link, options) if given.link else run_ranks(given.ranks, measure, options)
    )
    print(f"torch {torch.__version__}, {given.link or 'loopback'}, {options}")
    base, rows = found["seconds"]["fp32"], []
    for variant, samples in found["seconds"].items():
        times = [f"{1e3 * statistics.median(s):.0f}" for s in (samples, found["busy"][variant])]
        sent = f"{found['bytes'][variant] / (1 << 20):.1f}"
        rows.append([variant, times[0], f"{paired(samples, base):.2f}", times[1], sent])
    heads = ("communication", "ms, median", "x fp32", "CPU ms of rank 0", "MiB sent by a rank")
    print(*table(heads, rows), sep="\n")


if __name__ == "__main__":
    main()
