"""A host of two is lost under torchrun; the run ends on the other as the undisturbed one."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("polyshard_demo")
import torch
from fault_jobs import agent, final_state, losses, wait_for
from reproducible_demo import OPTIONS, SYLLABLES, demo
from torch.distributed import TCPStore

from polyshard_reproducible import compare
from polyshard_testing import World

# torch says that it loads without ranks, which is meant.
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

STEPS = 40
GIVEN: dict[str, Any] = {**OPTIONS, "steps": STEPS, "checkpoint_every": 5, "eval_every": 0}
RENDEZVOUS = "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=10"


def undisturbed(rank: int, size: int, out: str) -> list[float]:
    """One rank from the first step to the last; its losses."""
    trainer = demo(rank, size, out, clip=1.0, record=Path(out, "records"), **GIVEN)
    trainer.run()
    return [step.loss for step in trainer.history.steps]


def test_a_rank_is_killed_and_fewer_go_on(world1: World, tmp_path: Path) -> None:
    whole, run, text = (tmp_path / name for name in ("whole", "run", "syllables"))
    expected = world1.run(undisturbed, str(whole), timeout=None)[0]
    text.write_bytes(SYLLABLES)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in GIVEN.items()]
    paths = [f"--text={text}", f"--out={run}", f"--record={run / 'records'}", "--resume=auto"]
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torchrun = [
        *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5", "--rdzv-backend=c10d"),
        *(f"--rdzv-endpoint=localhost:{store.port}", "--rdzv-id=job", "--local-addr=localhost"),
    ]
    with ExitStack() as opened:
        stays, lost = (
            opened.enter_context(
                agent(
                    [*torchrun, f"--rdzv-conf=is_host=false,{RENDEZVOUS}"],
                    [*options, *paths, "--log-every=1"],
                )
            )
            for _ in range(2)
        )
        wait_for([stays, lost], "engine polyshard, 2 ranks")
        fault = wait_for([stays, lost], r"^step +1\d/").time
        for process in (lost.process.pid, *lost.ranks()):
            os.kill(process, signal.SIGKILL)
        wait_for([stays], "engine polyshard, 1 ranks", fault)
        wait_for([stays], "going on after step", fault)
        assert stays.process.wait(600) == 0, stays.said()
    assert losses(run) == expected
    found, wanted = final_state(run), final_state(whole)
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
    compared = compare(whole / "records", run / "records")
    assert compared.first is None
    assert compared.steps == tuple(range(1, STEPS + 2))
