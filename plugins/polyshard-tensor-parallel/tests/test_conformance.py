"""The kit every plugin passes."""

from __future__ import annotations

import pytest

from polyshard_tensor_parallel import TensorParallel
from polyshard_testing import PluginConformance
from polyshard_testing.runs import Factory


class TestTensorParallel(PluginConformance):
    @pytest.fixture
    def factory(self) -> Factory:
        return TensorParallel
