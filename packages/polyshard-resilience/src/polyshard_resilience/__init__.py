"""Long runs: all ranks learn of a failure, steps are undone, guards watch what a run computes."""

from polyshard_resilience.guards.corruption import Corruption
from polyshard_resilience.guards.nonfinite import NonFinite
from polyshard_resilience.handler import enable
from polyshard_resilience.replicas import Replicas, ReplicaStep
from polyshard_resilience.resizing.resize import Resized, resize
from polyshard_resilience.rollback.attempt import Attempt, attempt, attempts
from polyshard_resilience.rollback.optimizers import Undoable

__all__ = [
    "Attempt",
    "Corruption",
    "NonFinite",
    "ReplicaStep",
    "Replicas",
    "Resized",
    "Undoable",
    "attempt",
    "attempts",
    "enable",
    "resize",
]
