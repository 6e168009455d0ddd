"""The kit judges plugins on the device: right ones pass, careless ones do not."""

from __future__ import annotations

import pytest
from careless_plugins import Hasty, Ordered, Patient, Unordered

from polyshard_testing import PluginConformance
from polyshard_testing.runs import Factory


class Judged(PluginConformance):
    host_waits = 40  # of the storages, whose optimizer runs on the host


@pytest.mark.parametrize("factory", [Ordered, Patient])
def test_right_plugins_pass(factory: Factory) -> None:
    Judged().test_order_on_a_device(factory)


@pytest.mark.parametrize("factory", [Unordered, Hasty])
def test_careless_plugins_are_caught(factory: Factory) -> None:
    with pytest.raises(AssertionError, match=r"Verdict\(mode="):
        Judged().test_order_on_a_device(factory)


def test_host_waits_are_counted() -> None:
    with pytest.raises(AssertionError, match="host_waits"):
        PluginConformance().test_order_on_a_device(Patient)
