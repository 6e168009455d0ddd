"""Hide the distributions that ``POLYSHARD_HIDDEN`` names (commas between them) from this process.

Python imports this module at start where its folder is on ``PYTHONPATH``, so that a test session,
its ranks and its subprocesses see an environment that lacks those distributions: no module of
theirs is found, and ``importlib.metadata`` lists neither them nor their entry points.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from importlib.metadata import PathDistribution
from typing import Any

_HIDDEN = frozenset(filter(None, os.environ.get("POLYSHARD_HIDDEN", "").split(",")))
_MODULES = frozenset(name.replace("-", "_") for name in _HIDDEN)


class _Finder(PathFinder):
    """Python's own finder, less what is hidden."""

    @classmethod
    def find_spec(cls, fullname: str, *args: Any, **kwargs: Any) -> Any:
        """Return ``None`` for a hidden module, as for one that is not installed."""
        if fullname.partition(".")[0] in _MODULES:
            return None
        return super().find_spec(fullname, *args, **kwargs)

    @staticmethod
    def find_distributions(*args: Any, **kwargs: Any) -> Iterable[PathDistribution]:
        """Leave hidden distributions out."""
        return (found for found in PathFinder.find_distributions(*args, **kwargs) if _shows(found))


def _shows(found: PathDistribution) -> bool:
    return (found.metadata["Name"] or "").lower().replace("_", "-") not in _HIDDEN


if _HIDDEN:
    sys.meta_path[sys.meta_path.index(PathFinder)] = _Finder
