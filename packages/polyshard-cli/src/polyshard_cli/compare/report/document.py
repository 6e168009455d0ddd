"""The comparison as plain data; every field is in docs/reference/compare.md."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from polyshard_cli.compare.settings import Settings
from polyshard_cli.compare.training.memory import Memory

__all__ = ["SCHEMA", "Comparison", "Environment", "Error", "JobFacts", "Losses", "Result", "Timing"]

SCHEMA = 1


@dataclass(frozen=True)
class Environment:
    """What it was measured with. ``threads``: compute threads of each process."""

    polyshard: str
    torch: str
    python: str
    cores: int
    threads: int


@dataclass(frozen=True)
class JobFacts:
    """The job: elements of its model, and how many modules are sharded one by one."""

    name: str
    parameters: int
    trainable: int
    units: int


@dataclass(frozen=True)
class Error:
    """Why an engine has no numbers. ``step`` is ``None`` before the first."""

    message: str
    rank: int
    step: int | None
    details: str


@dataclass(frozen=True)
class Timing:
    """Seconds of a step, of its slowest rank.

    Attributes:
        median_seconds: of ``step_seconds``, which leave out the warm-up.
        step_seconds: step by step.
        ratio: of the medians, this engine's over the reference's.
        paired_ratio: median of the ratios of single steps; ``None`` where engines did not take
            turns.
    """

    median_seconds: float
    step_seconds: tuple[float, ...]
    ratio: float
    paired_ratio: float | None


@dataclass(frozen=True)
class Losses:
    """Means over ranks, step by step, warm-up included.

    Attributes:
        steps: the means.
        largest_difference: to the reference, of the means.
        bitwise: whether the losses of every batch are bitwise the reference's.
    """

    steps: tuple[float, ...]
    largest_difference: float
    bitwise: bool


@dataclass(frozen=True)
class Result:
    """What one engine came to. All but ``name`` and ``error`` is empty where it failed.

    Attributes:
        name: the engine with its options.
        error: why it failed.
        timing: of its steps.
        memory: of every rank.
        wire_bytes: sent in a step by each rank over TCP; ``None`` where that is not known.
        counted_bytes: the same as the engine counts; ``None`` where it does not.
        losses: step by step.
        plan: polyshard's, on rank 0, as ``print(describe(model))`` shows it; ``None`` for others.
    """

    name: str
    error: Error | None = None
    timing: Timing | None = None
    memory: tuple[Memory, ...] = ()
    wire_bytes: tuple[int, ...] | None = None
    counted_bytes: tuple[int, ...] | None = None
    losses: Losses | None = None
    plan: str | None = None

    @property
    def peak_bytes(self) -> int:
        """Of the rank that held most."""
        return max((one.peak_bytes for one in self.memory), default=0)

    @property
    def sent_bytes(self) -> int | None:
        """In a step by the rank that sent most: over TCP, or else as the engine counts."""
        found = self.wire_bytes if self.wire_bytes is not None else self.counted_bytes
        return None if found is None else max(found)


@dataclass(frozen=True)
class Comparison:
    """Engines side by side.

    Attributes:
        schema: version of these fields.
        settings: what was asked for.
        environment: what it was measured with.
        job: what was trained; ``None`` where no engine came to build it.
        reference: the first engine that came to the end, with which others are compared.
        results: in the order in which engines were named.
    """

    schema: int
    settings: Settings
    environment: Environment
    job: JobFacts | None
    reference: str | None
    results: tuple[Result, ...]

    @property
    def failed(self) -> bool:
        """Whether an engine has no numbers."""
        return any(result.error is not None for result in self.results)

    def to_json(self) -> str:
        """One JSON object; numbers that are not finite are ``null``."""
        return json.dumps(_finite(asdict(self)), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
