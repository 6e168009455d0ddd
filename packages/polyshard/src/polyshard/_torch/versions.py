"""Which versions of torch polyshard is tested with, and a word where it runs on a newer one."""

from __future__ import annotations

import warnings
from functools import cache

import torch

from polyshard._torch.newer import release
from polyshard.errors import UntestedVersionWarning

OLDEST, NEWEST = (2, 11), (2, 15)
"""The first two numbers of the versions; ``docs/reference/versions.md`` says what was run."""


def tested_range() -> str:
    """Both ends, as users write them."""
    return " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))


@cache
def warn_if_untested() -> None:
    """Say once in a process that the installed torch is newer than any that is tested.

    There is no upper bound to what may be installed: most of a new version works, and what does not
    is better met with this line above it.
    """
    if release() > NEWEST:
        warnings.warn(
            f"polyshard is tested with torch {tested_range()}; this is {torch.__version__}. "
            "Compare a few losses with FSDP2's before a long run, or install a tested version.",
            UntestedVersionWarning,
            stacklevel=3,
        )
