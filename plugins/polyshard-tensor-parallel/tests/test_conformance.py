"""The kit every plugin passes."""

from __future__ import annotations

import pytest

from polyshard.testing import PluginConformance
from polyshard.testing.runs import Factory
from polyshard_tensor_parallel import TensorParallel


class TestTensorParallel(PluginConformance):
    @pytest.fixture
    def factory(self) -> Factory:
        return TensorParallel
