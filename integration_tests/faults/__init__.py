"""Things that go wrong on one rank, and what all ranks make of it. See ``python -m faults``."""
