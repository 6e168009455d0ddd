"""Optimizers on sharded parameters: elementwise ones in long runs, whole matrices on one rank."""

from polyshard_optimizers.__about__ import __version__
from polyshard_optimizers.matrix.choosing import hidden_matrices
from polyshard_optimizers.matrix.errors import MatrixError
from polyshard_optimizers.matrix.optimizer import MatrixSteps
from polyshard_optimizers.matrix.plugin import MatrixOptimizer
from polyshard_optimizers.stepping.flat import flat

__all__ = [
    "MatrixError",
    "MatrixOptimizer",
    "MatrixSteps",
    "__version__",
    "flat",
    "hidden_matrices",
]
