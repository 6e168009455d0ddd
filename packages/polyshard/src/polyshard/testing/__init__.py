"""For tests of polyshard and of its plugins; needs the extra ``polyshard[testing]``."""

from typing import TYPE_CHECKING, Any

from polyshard.testing.world import RankError, World

if TYPE_CHECKING:
    from polyshard.testing.conformance import PluginConformance

__all__ = ["PluginConformance", "RankError", "World"]

if not TYPE_CHECKING:  # else every misspelt name would have a type

    def __getattr__(name: str) -> Any:
        """Import the conformance tests when they are asked for: ranks have no use for pytest."""
        if name != "PluginConformance":
            raise AttributeError(f"module 'polyshard.testing' has no attribute '{name}'")
        import pytest

        pytest.register_assert_rewrite("polyshard.testing.conformance")
        from polyshard.testing.conformance import PluginConformance

        return PluginConformance
