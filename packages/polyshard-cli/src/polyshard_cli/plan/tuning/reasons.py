"""Why one setting beats another: the part of a step that takes longer, or of memory that grows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polyshard.planning import readable
from polyshard_cli.plan.estimate.timing import Timing
from polyshard_cli.plan.tuning.search import Tried

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
