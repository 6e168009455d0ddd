"""A simulated accelerator for tests: a torch device type with streams that run later."""

from polyshard_sim.enabling import Counters, counters, enable, is_buildable, reset_counters
from polyshard_sim.errors import SimError

__all__ = ["Counters", "SimError", "counters", "enable", "is_buildable", "reset_counters"]
