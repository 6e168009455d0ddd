"""A stand-in for an accelerator, on the CPU: it records who uses which memory when, on what stream.

Operations run at once, as on any CPU; what is recorded is what an accelerator would have been free
to do. See :mod:`.clocks` for the question it answers, and :func:`recorded` for how to ask it.
"""

from polyshard_testing.streams.clocks import Ledger, Race
from polyshard_testing.streams.recorder import Recorder, recorded

__all__ = ["Ledger", "Race", "Recorder", "recorded"]
