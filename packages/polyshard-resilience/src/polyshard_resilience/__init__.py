"""Long runs: steps that succeed on all ranks or are undone, and guards of what a run computes."""

from polyshard_resilience.guards.corruption import Corruption
from polyshard_resilience.guards.nonfinite import NonFinite
from polyshard_resilience.rollback.attempt import Attempt, attempt, attempts

__all__ = ["Attempt", "Corruption", "NonFinite", "attempt", "attempts"]
