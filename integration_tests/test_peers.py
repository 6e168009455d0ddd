"""Faults on torch's own FSDP2: ranks see what the page of faults says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from faults.peers import run_peer

from benchmarks.result import RESULTS, read
from fault_table import PEER_FAULTS, PEER_TIMEOUT_SECONDS, PEERS

QUICK = ("torchrun", "killed")
CASES = [
    pytest.param(*case, marks=() if case == QUICK else pytest.mark.thorough)
    for case in ((launcher, fault) for launcher in PEERS for fault in PEER_FAULTS)
]


def verdict(found: dict[str, Any]) -> tuple[object, ...]:
    """What does not depend on how busy the machine is.

    gloo's error and torchrun's SIGTERM come at about the same moment.
    """
    beside = found["beside"]
    saw_nothing = beside["saw"] == "nothing"
    has_waited = beside.get("seconds", 0.0) > 0.9 * PEER_TIMEOUT_SECONDS
    return saw_nothing, has_waited, found["goes_on"], found.get("is_restarted")


@pytest.mark.parametrize(("launcher", "fault"), CASES)
def test_a_fault_on_fsdp2(launcher: str, fault: str, tmp_path: Path) -> None:
    if launcher == "torchft":
        pytest.importorskip("torchft", reason="torchft not installed")
    told = read(RESULTS / "faults" / "peers.json").found[launcher][fault]
    assert verdict(run_peer(launcher, fault, tmp_path)) == verdict(told)
