"""Waits left out one by one: a test that passes without a wait does not test it.

with mutants.record() as sites:
    step()
for site in sites:
    with mutants.leave_out(site):
        ...  # step() must give wrong numbers in at least one mode
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from polyshard_sim.building import extension

# Wrappers whose callers are the ones that wait.
_WRAPPERS = (
    "polyshard_sim/device.py",
    "torch/_ops.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/c10d_logger.py",
    "torch/distributed/distributed_c10d.py",
)
_ENGINE = "torch/autograd/"  # autograd waits by itself when gradients cross streams


@dataclass(frozen=True, order=True)
class WaitSite:
    """A line that makes a stream wait, for an event or stream or for a collective."""

    file: str
    """From ``site-packages`` or ``src`` on, else the whole path."""
    line: int
    kind: str
    """``stream`` for ``wait_event`` and ``wait_stream``, ``work`` for ``Work.wait``."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.kind})"


@contextmanager
def record(through: tuple[str, ...] = ()) -> Iterator[Counter[WaitSite]]:
    """Count the waits of each site in a block.

    Args:
        through: ends of paths of further wrappers; their callers are the sites.
    """
    sites: Counter[WaitSite] = Counter()

    def note(site: WaitSite) -> bool:
        sites[site] += 1
        return True

    with _filtering(note, through):
        yield sites


@contextmanager
def leave_out(site: WaitSite, through: tuple[str, ...] = ()) -> Iterator[Counter[WaitSite]]:
    """Leave out the waits of ``site`` in a block; yields how often that happened.

    Args:
        site: one of :func:`record`.
        through: as it was given to :func:`record`.
    """
    left_out: Counter[WaitSite] = Counter()

    def keep(here: WaitSite) -> bool:
        left_out[here] += here == site
        return here != site

    with _filtering(keep, through):
        yield left_out


@contextmanager
def _filtering(keep: Callable[[WaitSite], bool], through: tuple[str, ...]) -> Iterator[None]:
    def ask(kind: str) -> bool:
        site = _site(sys._getframe().f_back, kind, _WRAPPERS + through)
        return site is None or keep(site)

    extension().set_wait_filter(ask)
    try:
        yield
    finally:
        extension().set_wait_filter(None)


def _site(frame: FrameType | None, kind: str, wrappers: tuple[str, ...]) -> WaitSite | None:
    """The line that waits; none for threads without Python, and for autograd itself."""
    while frame is not None and frame.f_code.co_filename.endswith(wrappers):
        frame = frame.f_back
    if frame is None:
        return None
    file = _short(frame.f_code.co_filename)
    return None if file.startswith(_ENGINE) else WaitSite(file, frame.f_lineno, kind)


def _short(path: str) -> str:
    parts = Path(path).parts
    for root in ("site-packages", "src"):
        if root in parts:
            return "/".join(parts[parts.index(root) + 1 :])
    return path
