"""Processes: each engine has ranks of its own."""
