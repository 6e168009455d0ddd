"""Every row of the benchmark of step time: what is trained, and the bars it is held to.

A bar is the largest ratio wanted. Where a run misses one, the table says so, with the reason that
is kept here beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.step.time import BEST_STEP, FLAT_MEMORY, FLOOR, MEMORY, STEP, Case

BITWISE, ROUNDED, LOSSY = "bitwise", "close", "lossy"
"""Losses bitwise equal to FSDP2's; equal to the rounding of another order of sums; neither."""
CLOSE = {"float32": 5e-5, "bfloat16": 2e-2}
"""Relative difference of losses that counts as close, by compute dtype."""


@dataclass(frozen=True)
class Bar:
    """``quantity`` (a key of a result's ratios) is to be ``at_most`` this.

    ``reason`` says why it is missed, where it is known to be.
    """

    quantity: str
    at_most: float
    reason: str = ""


@dataclass(frozen=True)
class Row:
    """One row of the tables."""

    name: str
    case: Case
    note: str = ""
    losses: str = BITWISE
    bars: tuple[Bar, ...] = (Bar(STEP, 1.00),)

    def __post_init__(self) -> None:
        """A bar on memory that is not measured would pass unseen.

        Raises:
            ValueError: for such a bar.
        """
        if not self.case.memory and any("memory" in bar.quantity for bar in self.bars):
            raise ValueError(f"row '{self.name}' has a bar on memory, which it does not measure")

    def quick(self) -> Row:
        """The same code in seconds; figures of it mean nothing."""
        return replace(self, case=self.case.quick(), bars=())


WIDE, NARROW = Case(width=1024, steps=5, warmup=2), Case(width=512, steps=7, warmup=2)

OPTIMIZER_PEAK = "The peak is the optimizer's, with foreach temporaries, equal for every engine."
NO_ROOM = "Process, shards and state leave 75 MiB below the bar; one layer unsharded takes 98."
MOSTLY_TORCH = "Of the 642 MiB, 262 are the process with torch, equal for every engine."
FOUR_ON_TWO = "Four ranks and their transfers share two cores; the floor is no faster."
ACTIVATIONS = "Mostly activations, equal for every engine."


def _bars(step: float, memory_reason: str) -> tuple[Bar, ...]:
    return (Bar(STEP, step), Bar(FLOOR, 1.10), Bar(MEMORY, 0.75, memory_reason))


def _mode(mode: str, note: str, losses: str = BITWISE, **sizes: Any) -> Row:
    return Row(mode, replace(NARROW, mode=mode, **sizes), note, losses)


ROWS: tuple[Row, ...] = (
    Row(
        "wide-2",
        replace(WIDE, memory=True),
        "communication-bound",
        bars=(
            *_bars(0.40, OPTIMIZER_PEAK),
            Bar(BEST_STEP, 0.35),
            Bar(FLAT_MEMORY, 0.80, NO_ROOM),
        ),
    ),
    Row(
        "wide-4",
        replace(WIDE, ranks=4, memory=True),
        "communication-bound",
        ROUNDED,
        _bars(0.45, OPTIMIZER_PEAK),
    ),
    Row(
        "wide-bf16",
        replace(WIDE, dtype="bfloat16"),
        "computes in bf16, reduces in fp32",
        ROUNDED,
        (Bar(STEP, 1.00), Bar(FLOOR, 1.10)),
    ),
    Row("narrow-2", replace(NARROW, memory=True), bars=_bars(0.55, MOSTLY_TORCH)),
    Row(
        "narrow-4",
        replace(NARROW, ranks=4),
        losses=ROUNDED,
        bars=(Bar(STEP, 0.55, FOUR_ON_TWO), Bar(FLOOR, 1.10)),
    ),
    Row(
        "compute-2",
        replace(NARROW, tokens=512, memory=True),
        "compute-bound",
        bars=_bars(0.90, ACTIVATIONS),
    ),
    _mode("keep", "`reshard_after_forward=False`"),
    _mode("blocks", "`reshard_after_forward=2`", ROUNDED, ranks=4),
    _mode("hsdp", "2 replicas of 2 shards", ROUNDED, ranks=4),
    _mode("columns", "matrices sharded on dim 1"),
    _mode("accumulate", "2 micro-batches, the first without communication"),
    _mode("quantized", "int8 weights and gradients; FSDP2 sends fp32", LOSSY),
    _mode(
        "offload-optimizer",
        "state on the host; FSDP2 leaves it on the device (both are RAM here)",
        memory=True,
    ),
    _mode("offload-params", "all on the host; FSDP2 with `CPUOffloadPolicy`", memory=True),
    _mode(
        "tensor-parallel",
        "TP 2 × FSDP 2; torch's `parallelize_module` and `fully_shard`",
        ROUNDED,
        ranks=4,
    ),
)


def row(name: str) -> Row:
    """A row by its name.

    Raises:
        KeyError: there is none.
    """
    return {each.name: each for each in ROWS}[name]
