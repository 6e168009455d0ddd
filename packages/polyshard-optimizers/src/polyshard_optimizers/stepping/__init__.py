"""Optimizer steps over runs: contiguous elements of a group's shard that are stepped together.

What a plugin needs that keeps an optimizer's state elsewhere.
"""

from polyshard_optimizers.stepping.elementwise import check_takeable
from polyshard_optimizers.stepping.keeper import Lent, OptimizerKeeper
from polyshard_optimizers.stepping.stepper import SteppedOptimizer, Stepper
from polyshard_optimizers.stepping.twins import Twins

__all__ = ["Lent", "OptimizerKeeper", "SteppedOptimizer", "Stepper", "Twins", "check_takeable"]
