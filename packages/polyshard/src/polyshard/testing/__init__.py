"""For tests of polyshard and of its plugins; needs the extra ``polyshard[testing]``."""

from polyshard.testing.world import RankError, World

__all__ = ["RankError", "World"]
