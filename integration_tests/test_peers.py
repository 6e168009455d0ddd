"""Faults on torch's own FSDP2: ranks see what the page of faults says of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.peers import run_peer

from benchmarks.result import RESULTS, read
from fault_table import PEER_FAULTS, PEERS, verdict


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", PEERS)
@pytest.mark.parametrize("fault", PEER_FAULTS)
def test_a_fault_on_fsdp2(launcher: str, fault: str, tmp_path: Path) -> None:
    if launcher == "torchft":
        pytest.importorskip("torchft", reason="torchft not installed")
    told = read(RESULTS / "faults" / "peers.json").found[launcher][fault]
    assert verdict(run_peer(launcher, fault, tmp_path)) == verdict(told)
