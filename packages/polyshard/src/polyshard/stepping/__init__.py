"""Optimizer steps over runs: contiguous elements of a group's shard that are stepped together."""
