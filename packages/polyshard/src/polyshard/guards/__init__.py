"""What a long run checks of itself: finite gradients, memory that holds what was written."""

from polyshard.guards.corruption import Corruption
from polyshard.guards.nonfinite import NonFinite

__all__ = ["Corruption", "NonFinite"]
