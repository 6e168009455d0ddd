"""Optimizers that need whole matrices: each gradient lands on one rank, which makes its update."""

from polyshard_matrix.__about__ import __version__
from polyshard_matrix.choosing import hidden_matrices
from polyshard_matrix.errors import MatrixError
from polyshard_matrix.optimizer import MatrixSteps
from polyshard_matrix.plugin import MatrixOptimizer

__all__ = ["MatrixError", "MatrixOptimizer", "MatrixSteps", "__version__", "hidden_matrices"]
