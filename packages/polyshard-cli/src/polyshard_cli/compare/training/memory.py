"""Memory of this process: the kernel's books on the CPU, the allocator's on an accelerator."""

from __future__ import annotations

import gc
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Memory", "Meter", "resident"]

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
FORGET_PEAK = "5"  # proc(5): resets the peak of resident memory to what is resident now


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        peak_bytes: most that was held in a step, above what the process held before it had a
            model. Resident memory on the CPU, what the allocator gave out on an accelerator.
        start_bytes: held before there was a model.
        with_build: whether the peak is also over building and sharding the model, where the
            system cannot forget that.
    """

    peak_bytes: int
    start_bytes: int
    with_build: bool


class Meter:
    """Begun before a model is built; :meth:`begin_steps` before the first step."""

    def __init__(self, device: torch.device) -> None:
        """What is held now is not the model's."""
        self._device = device
        self._start = 0 if self._on_device else resident("VmRSS:")
        self._with_build = True

    def begin_steps(self) -> None:
        """Forget the peak of building, where that can be."""
        gc.collect()
        if self._on_device:
            torch.accelerator.reset_peak_memory_stats(self._device)
            self._with_build = False
            return
        try:
            CLEAR.write_text(FORGET_PEAK, "ascii")
        except OSError:
            return
        self._with_build = False

    def read(self) -> Memory:
        """The peak so far."""
        if self._on_device:
            peak = torch.accelerator.max_memory_allocated(self._device)
        else:
            peak = resident("VmHWM:")
        return Memory(max(0, peak - self._start), self._start, self._with_build)

    @property
    def _on_device(self) -> bool:
        return self._device.type != "cpu"


def resident(line: str) -> int:
    """Bytes of ``VmRSS:`` or ``VmHWM:``; of the most ever where there is no such line."""
    if STATUS.exists():
        for found in STATUS.read_text("ascii", "replace").splitlines():
            if found.startswith(line):
                return int(found.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return peak if os.name == "posix" else 0
