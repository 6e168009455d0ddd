"""What a search found, as data: frozen, and the same as JSON.

``docs/reference/plan.md`` says what each field means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from polyshard.planning import readable
from polyshard_cli.plan.estimate.timing import Timing
from polyshard_cli.plan.tuning.search import Tried
from polyshard_cli.plan.tuning.space import Choice, mesh_text

TENSOR = "collectives of tensor parallelism"
"""The part of what is waited for that counts as compute, too."""


@dataclass(frozen=True)
class Difference:
    """Seconds of one part of a step: of the best setting, and of the other."""

    part: str
    best_seconds: float
    other_seconds: float

    @property
    def seconds(self) -> float:
        """How much longer the other takes."""
        return self.other_seconds - self.best_seconds


def parts_of(timing: Timing) -> dict[str, float]:
    """Seconds that add up to the step: compute, the optimizer, and each thing waited for."""
    exposed = dict(timing.exposed)
    compute = timing.compute_seconds - exposed.get(TENSOR, 0.0)  # it holds those as well
    return {"forward and backward": compute, "optimizer": timing.optimizer_seconds, **exposed}


def differences(best: Tried, other: Tried) -> tuple[Difference, ...]:
    """Parts in which they differ, those that cost most first; they add up to the difference."""
    ours, theirs = _parts(best), _parts(other)
    names = dict.fromkeys([*ours, *theirs])
    found = [Difference(name, ours.get(name, 0.0), theirs.get(name, 0.0)) for name in names]
    return tuple(sorted((d for d in found if d.seconds), key=lambda d: -d.seconds))


def _parts(tried: Tried) -> Mapping[str, float]:
    timing = tried.needs.timing
    assert timing is not None, "what did not run is refused"
    return parts_of(timing)


def reason(best: Tried, other: Tried) -> str:
    """Why ``other`` lost, in a sentence."""
    slower, larger = other.seconds - best.seconds, other.memory_bytes - best.memory_bytes
    if slower <= 0:
        return f"as fast, and takes {readable(larger)} more" if larger else "equal in all"
    most = differences(best, other)[0]
    words = f"{slower / best.seconds:.1%} slower: {most.part} +{most.seconds * 1e3:,.3f} ms"
    if larger < 0:
        return f"{words}; it takes {readable(-larger)} less memory"
    return f"{words}; it takes {readable(larger)} more memory" if larger else words


SCHEMA = 1


@dataclass(frozen=True)
class Point:
    """One setting, and what it needs."""

    name: str
    """Options of ``polyshard plan`` that make it."""
    memory_bytes: int
    seconds: float
    chosen: bool
    fits: bool
    """Whether the budget holds it."""
    phase: str
    """In which the device holds most."""
    sent_bytes: int
    mesh: str
    units: tuple[str, ...]
    """Patterns; none: one unit a block."""
    reshard: bool | int | None
    quantize: str
    offload: str


@dataclass(frozen=True)
class Refusal:
    """Why settings cannot be, and how many."""

    reason: str
    count: int


@dataclass(frozen=True)
class RunnerUp:
    """The next best setting, and why it is not the best."""

    point: Point
    reason: str
    differences: tuple[Difference, ...]
    """Parts of a step, those that cost most first."""


@dataclass(frozen=True)
class Tuning:
    """Everything ``polyshard plan --tune`` says."""

    schema: int
    polyshard: str
    torch: str
    model: str
    ranks: int
    batch: int
    """Sequences a step over all ranks, the same for every setting."""
    sequence: int
    machine: str
    budget_bytes: int
    """Of a device; 0: no limit is known."""
    tried: int
    """Settings that work."""
    fitting: int
    """Of those, within the budget."""
    is_exhaustive: bool
    refused: tuple[Refusal, ...]
    skipped: tuple[str, ...]
    """What was not searched, and why."""
    units: Mapping[str, tuple[str, ...]]
    """Patterns of units by the word that tables have for them; none: one unit a block."""
    front: tuple[Point, ...]
    """The fastest first: no other setting takes less memory in less time."""
    best: Point
    runner_up: RunnerUp | None
    python: str
    """The best setting, to paste."""

    def to_json(self) -> str:
        """As ``--tune --json`` prints it."""
        return json.dumps(asdict(self), indent=2)


def point_of(tried: Tried, best: Choice, budget_bytes: int) -> Point:
    """``tried`` as data."""
    choice = tried.choice
    return Point(
        name=choice.name,
        memory_bytes=tried.memory_bytes,
        seconds=tried.seconds,
        chosen=choice == best,
        fits=not budget_bytes or tried.memory_bytes <= budget_bytes,
        phase=tried.needs.memory.peak.name,
        sent_bytes=tried.sent_bytes,
        mesh=mesh_text(choice.mesh),
        units=choice.units,
        reshard=choice.reshard,
        quantize=choice.quantize,
        offload=choice.offload,
    )


def refusals_of(refused: Mapping[str, int]) -> tuple[Refusal, ...]:
    """Most of them first."""
    found = sorted(refused.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Refusal(reason, count) for reason, count in found)
