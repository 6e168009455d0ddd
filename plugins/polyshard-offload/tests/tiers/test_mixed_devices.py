"""Parameters on the host and on an accelerator in one optimizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys

import polyshard_sim

polyshard_sim.enable(mode="random", seed=0)

import torch
from torch import nn
from polyshard_offload import DiskSettings, Offload

PLACES = ("sim", "cpu", "sim", "cpu")


def trained(offload, kind):
    params = [nn.Parameter(torch.linspace(0, 1, 4000).to(place)) for place in PLACES]
    optimizer = kind(params)
    if offload is not None:
        offload.wrap(optimizer)
    for step in range(4):
        for index, parameter in enumerate(params):
            parameter.grad = torch.full_like(parameter, 0.1 * step + index)
        optimizer.step()
        optimizer.zero_grad()
    states = [optimizer.state[parameter] for parameter in params]
    return params, [s.get("exp_avg", s.get("momentum_buffer")) for s in states]


class Mine(torch.optim.SGD):
    pass  # which is not known to be elementwise


for kind in (torch.optim.AdamW, lambda params: Mine(params, lr=0.1, momentum=0.9)):
    theirs = trained(None, kind)
    for tier in ("host", "disk"):
        disk = DiskSettings(path=sys.argv[1])
        offload = Offload(params="host", optimizer=tier, disk=disk, chunk_bytes=1)
        ours = trained(offload, kind)
        for one, other in zip(theirs, ours):
            assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(one, other))
        assert [moment.device.type for moment in ours[1]] == list(PLACES)
print("done")
"""


def test_state_is_kept_beside_each_parameter(tmp_path: Path) -> None:
    """What is on the accelerator has its state there, since it is stepped there."""
    building = pytest.importorskip("polyshard_sim.building")
    if missing := building.missing_tools():
        pytest.skip(f"cannot compile: {missing}")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["done"]
