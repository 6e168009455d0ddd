"""Every row of the benchmark of step time: what is trained, and the bars it is held to.

A bar is the largest ratio wanted. Where a run misses one, the table says so, with the reason that
is kept here beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.step.case import Case

STEP = "step / torch"
FLOOR = "step / floor"
MEMORY = "peak memory / torch"
BEST_STEP = "step / torch best"
FLAT_MEMORY = "peak memory, flat / torch"
KEPT = "polyshard kept best"
OTHERS = ("ddp", "fsdp1")

# Equal to FSDP2's to the last bit; to the rounding of another order of sums; not meant to be.
Losses = Literal["bitwise", "close", "lossy"]

CLOSE = {"float32": 5e-5, "bfloat16": 2e-2, "float16": 1e-2}
"""Relative difference of losses that counts as close, by compute dtype."""


@dataclass(frozen=True)
class Bar:
    """``quantity`` (a key of a result's ratios) is to be ``at_most`` this.

    ``reason`` says why it is missed, where it is known to be.
    """

    quantity: str
    at_most: float
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row. Memory is measured, in runs of its own, where ``memory`` says so."""

    name: str
    case: Case
    bars: tuple[Bar, ...] = (Bar(STEP, 1.00),)
    losses: Losses = "bitwise"
    memory: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        """A bar on memory that nobody measures would pass unseen.

        Raises:
            ValueError: for such a bar.
        """
        if not self.memory and any("memory" in bar.quantity for bar in self.bars):
            raise ValueError(f"row '{self.name}' has a bar on memory, which it does not measure")

    def quick(self) -> Row:
        """The same code in seconds; figures of it mean nothing."""
        return replace(self, case=self.case.quick(), memory=False, bars=())


def _bars(step: float, *, memory_reason: str = "") -> tuple[Bar, ...]:
    return (Bar(STEP, step), Bar(FLOOR, 1.10), Bar(MEMORY, 0.75, memory_reason))


WIDE, NARROW = Case(width=1024, steps=5, warmup=2), Case(width=512, steps=7, warmup=2)

OPTIMIZER_PEAK = "The peak is the optimizer's, with foreach temporaries, equal for every engine."
NO_ROOM = "Process, shards and state leave 75 MiB below the bar; one layer unsharded takes 98."
MOSTLY_TORCH = "Of the 642 MiB, 262 are the process with torch, equal for every engine."
FOUR_ON_TWO = "Four ranks and their transfers share two cores; the floor is no faster."
ACTIVATIONS = "Mostly activations, equal for every engine."

_MAIN = (
    Row(
        name="wide-2",
        case=WIDE,
        bars=(
            *_bars(0.40, memory_reason=OPTIMIZER_PEAK),
            Bar(BEST_STEP, 0.35),
            Bar(FLAT_MEMORY, 0.80, NO_ROOM),
        ),
        memory=True,
        note="communication-bound",
    ),
    Row(
        name="wide-4",
        case=replace(WIDE, ranks=4),
        bars=_bars(0.45, memory_reason=OPTIMIZER_PEAK),
        losses="close",
        memory=True,
        note="communication-bound",
    ),
    Row(
        name="wide-bf16",
        case=replace(WIDE, dtype="bfloat16"),
        bars=(Bar(STEP, 1.00), Bar(FLOOR, 1.10)),
        losses="close",
        note="computes in bf16, reduces in fp32",
    ),
    Row(name="narrow-2", case=NARROW, bars=_bars(0.55, memory_reason=MOSTLY_TORCH), memory=True),
    Row(
        name="narrow-4",
        case=replace(NARROW, ranks=4),
        bars=(Bar(STEP, 0.55, FOUR_ON_TWO), Bar(FLOOR, 1.10)),
        losses="close",
    ),
    Row(
        name="compute-2",
        case=replace(NARROW, tokens=512),
        bars=_bars(0.90, memory_reason=ACTIVATIONS),
        memory=True,
        note="compute-bound",
    ),
)

_MODES = (
    Row(name="keep", case=replace(NARROW, mode="keep"), note="`reshard_after_forward=False`"),
    Row(
        name="blocks",
        case=replace(NARROW, ranks=4, mode="blocks"),
        losses="close",
        note="`reshard_after_forward=2`",
    ),
    Row(
        name="hsdp",
        case=replace(NARROW, ranks=4, mode="hsdp"),
        losses="close",
        note="2 replicas of 2 shards",
    ),
    Row(name="columns", case=replace(NARROW, mode="columns"), note="matrices sharded on dim 1"),
    Row(
        name="accumulate",
        case=replace(NARROW, mode="accumulate"),
        note="2 micro-batches, the first without communication",
    ),
)

_PLUGINS = (
    Row(
        name="quantized",
        case=replace(NARROW, mode="quantized"),
        losses="lossy",
        note="int8 weights and gradients; FSDP2 sends fp32",
    ),
    Row(
        name="offload-optimizer",
        case=replace(NARROW, mode="offload-optimizer"),
        memory=True,
        note="state on the host; FSDP2 leaves it on the device (both are RAM here)",
    ),
    Row(
        name="offload-params",
        case=replace(NARROW, mode="offload-params"),
        memory=True,
        note="all on the host; FSDP2 with `CPUOffloadPolicy`",
    ),
    Row(
        name="tensor-parallel",
        case=replace(NARROW, ranks=4, mode="tensor-parallel"),
        losses="close",
        note="TP 2 × FSDP 2; torch's `parallelize_module` and `fully_shard`",
    ),
)

ROWS: tuple[Row, ...] = (*_MAIN, *_MODES, *_PLUGINS)
MAIN_ROWS = ("wide-2", "compute-2")
"""Those taken apart by group (see breakdown.py)."""
STEADY_ROW = "narrow-2"
"""The one run for 200 steps (see steadiness.py)."""


def row(name: str) -> Row:
    """A row by its name.

    Raises:
        KeyError: there is none.
    """
    return {each.name: each for each in ROWS}[name]
