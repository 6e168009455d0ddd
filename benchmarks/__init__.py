"""Measurements of polyshard, most of them beside torch's ``fully_shard``; a folder a subject.

Run ``python -m benchmarks`` for the suite, or a file alone: ``python -m benchmarks step.time``.
"""
