"""What the ranks of each engine have told, as it came."""

from __future__ import annotations

from dataclasses import dataclass, field

from polyshard_cli.compare.ranks.messages import Failure
from polyshard_cli.compare.training.memory import Memory
from polyshard_cli.compare.training.session import Facts, Sample

__all__ = ["Run"]


@dataclass
class Run:
    """One engine's; it grows step by step.

    Attributes:
        name: of the engine.
        facts: of the job, as the engine's first rank built it.
        steps: warm-up included, samples of every rank.
        memory: of every rank.
        plan: what the engine says it does, on rank 0.
        failure: why it did not come to the end.
    """

    name: str
    facts: Facts | None = None
    steps: list[list[Sample]] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    plan: str | None = None
    failure: Failure | None = None
