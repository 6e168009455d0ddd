"""Optimizers that need whole matrices: each gradient lands on one rank, which makes its update."""
