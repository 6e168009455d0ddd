"""Which engine catches which silent error of sharded training: ``python -m benchmarks.silent``."""
