"""For tests of polyshard and of its plugins; needs the extra ``polyshard[testing]``."""

import pytest

pytest.register_assert_rewrite("polyshard.testing.conformance")

from polyshard.testing.conformance import PluginConformance  # noqa: E402
from polyshard.testing.world import RankError, World  # noqa: E402

__all__ = ["PluginConformance", "RankError", "World"]
