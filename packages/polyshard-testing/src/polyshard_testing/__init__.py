"""For tests of polyshard and of its plugins: ranks, and the tests that every plugin should pass."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from polyshard_testing.world import RankError, World

if TYPE_CHECKING:
    from polyshard_testing.conformance import PluginConformance
    from polyshard_testing.rank_tests import raises_in_step, ranks

__all__ = ["PluginConformance", "RankError", "World", "raises_in_step", "ranks"]

_HOMES = {
    "PluginConformance": "conformance",
    "raises_in_step": "rank_tests",
    "ranks": "rank_tests",
}

if "pytest" in sys.modules:  # not in ranks, which do without its import
    sys.modules["pytest"].register_assert_rewrite("polyshard_testing.conformance")

if not TYPE_CHECKING:  # else every misspelt name would have a type

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'polyshard_testing' has no attribute '{name}'")
        return getattr(importlib.import_module(f"polyshard_testing.{_HOMES[name]}"), name)
