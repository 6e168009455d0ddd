"""From settings that leave things open to the best of them, as data: frozen, and the same as JSON.

``docs/reference/plan.md`` says what each field means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from polyshard.__about__ import __version__
from polyshard.planning import readable
from polyshard_cli.plan.drafting import subject_of
from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.estimate.memory import PARTS
from polyshard_cli.plan.estimate.timing import TENSOR, Timing
from polyshard_cli.plan.request.settings import Settings
from polyshard_cli.plan.tuning.script import script_of
from polyshard_cli.plan.tuning.search import (
    Choice,
    Found,
    Open,
    Search,
    Tried,
    front_of,
    ranked,
    space_of,
    with_batch,
)


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
    compute = timing.compute_seconds - exposed.get(TENSOR, 0.0)  # which holds those, too
    return {"forward and backward": compute, "optimizer": timing.optimizer_seconds, **exposed}


def differences(best: Tried, other: Tried) -> tuple[Difference, ...]:
    """Parts in which they differ, those that cost most first; they add up to the difference."""
    ours, theirs = parts_of(best.timing), parts_of(other.timing)
    names = dict.fromkeys([*ours, *theirs])
    found = [Difference(name, ours.get(name, 0.0), theirs.get(name, 0.0)) for name in names]
    return tuple(sorted((d for d in found if d.seconds), key=lambda d: -d.seconds))


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
        **{**vars(choice), "mesh": choice.mesh.text},
    )


def tune(settings: Settings, given: Open, budget_bytes: int = 0) -> Tuning:
    """The fastest setting that fits, and all that no other beats in memory and time.

    Args:
        settings: what is fixed, and a mesh of as many ranks as there are. All settings train on
            the batch that this mesh stands for.
        given: what may be changed.
        budget_bytes: that a device may hold; 0: what the machine's have.

    Raises:
        PlanError: when nothing works, or nothing fits: then it names the smallest.
    """
    settings = with_batch(settings)
    subject = subject_of(settings)
    budget = budget_bytes or subject.machine.memory_bytes
    space = space_of(settings, subject, given)
    found = Search(settings, subject).over(space, budget)
    order = ranked(found.tried, budget)
    if not order:
        raise PlanError(_nothing(found, budget))
    best = order[0]
    return Tuning(
        schema=SCHEMA,
        polyshard=__version__,
        torch=torch.__version__,
        model=subject.loaded.name,
        ranks=settings.mesh.ranks,
        batch=settings.batch,
        sequence=settings.sequence or subject.loaded.sequence,
        machine=subject.machine.name,
        budget_bytes=budget,
        tried=len(found.tried),
        fitting=len(order),
        is_exhaustive=found.is_exhaustive,
        refused=tuple(
            Refusal(why, count)
            for why, count in sorted(found.refused.items(), key=lambda item: (-item[1], item[0]))
        ),
        skipped=space.skipped,
        units=dict(space.units),
        front=tuple(point_of(t, best.choice, budget) for t in front_of(found.tried)),
        best=point_of(best, best.choice, budget),
        runner_up=_runner_up(order, budget),
        python=(
            f"# {best.seconds * 1e3:,.2f} ms a step and {readable(best.memory_bytes)} a rank, as "
            f"planned for {subject.machine.name}.\n"
            f"# On each of {settings.mesh.ranks} ranks; model and learning rate are yours.\n"
        )
        + script_of(best.choice.applied(settings), subject),
    )


def _runner_up(order: tuple[Tried, ...], budget: int) -> RunnerUp | None:
    """The next that differs in what it needs."""
    best = order[0]
    figures = (best.seconds, best.memory_bytes)
    second = next((t for t in order if (t.seconds, t.memory_bytes) != figures), None)
    if second is None:
        return None
    point = point_of(second, best.choice, budget)
    return RunnerUp(point, reason(best, second), differences(best, second))


def _nothing(found: Found, budget: int) -> str:
    if not found.tried:
        most, count = found.refused.most_common(1)[0]
        total = found.refused.total()
        return f"--tune: none of {total} settings works; {count} of them: {most}"
    least = min(found.tried, key=lambda t: (t.memory_bytes, t.seconds))
    phase = least.needs.memory.peak
    largest = max(PARTS, key=lambda part: getattr(phase, part))
    return (
        f"--memory-budget {readable(budget)}: none of {len(found.tried)} settings fits. The "
        f"smallest takes {readable(least.memory_bytes)} in {phase.name} (most for {largest}, "
        f"{readable(getattr(phase, largest))}): {least.choice.name}. Give it that, shard over more "
        "ranks, or shorten --batch or --sequence"
    )
