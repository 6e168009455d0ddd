"""Memory of this process, from the kernel's own books.

Resident bytes are what is said for the CPU. torch's CPU allocator keeps no statistics, and malloc's
would leave out pages that an engine maps itself, as polyshard does, so no allocator column is
honest there; CUDA has one (see gpu.py).
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """Resident now; 0 where the kernel does not say (anything but Linux)."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """The most that was ever resident, in this program (an exec inherits ``ru_maxrss``)."""
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
