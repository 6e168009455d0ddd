"""The kit judges plugins on the device: right ones pass, careless ones do not."""

from __future__ import annotations

import pytest
from careless_plugins import Hasty, Ordered, Patient, Unordered

from polyshard_sim.conformance import Judge
from polyshard_testing import PluginConformance
from polyshard_testing.runs import Factory


class Judged(PluginConformance):
    host_waits = 40  # of the storages, whose optimizer runs on the host


@pytest.mark.parametrize("factory", [Ordered, Patient])
def test_right_plugins_pass(factory: Factory, device_judge: Judge) -> None:
    Judged().test_order_on_a_device(factory, device_judge)


@pytest.mark.parametrize("factory", [Unordered, Hasty])
def test_careless_plugins_are_caught(factory: Factory, device_judge: Judge) -> None:
    with pytest.raises(AssertionError, match=r"Verdict\(mode="):
        Judged().test_order_on_a_device(factory, device_judge)


def test_host_waits_are_counted(device_judge: Judge) -> None:
    with pytest.raises(AssertionError, match="host_waits"):
        PluginConformance().test_order_on_a_device(Patient, device_judge)
