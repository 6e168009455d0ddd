"""When ``enable()`` may be called."""

from __future__ import annotations

from unittest import mock

import pytest
from toy_models import build

import polyshard
import polyshard_resilience
from polyshard import failures
from polyshard.agreement.meeting import agree
from polyshard.errors import LifecycleError
from polyshard_testing import ranks


@ranks(2)
def test_until_something_is_sharded(rank: int, size: int) -> None:
    """What agreed before, as ``TensorParallel.apply`` does, keeps no handler."""
    with mock.patch.object(failures, "_registry", return_value=failures._Registry()):
        agree(range(size), ["a plan of tensor parallelism"])
        polyshard_resilience.enable()
        assert failures.failure_handler().name == "polyshard-resilience"
        polyshard.fully_shard(build())
        polyshard_resilience.enable()  # which changes nothing
        with pytest.raises(LifecycleError, match=r"enable\(\) on every rank before fully_shard"):
            failures.handle_failures(failures.FailureHandler)
