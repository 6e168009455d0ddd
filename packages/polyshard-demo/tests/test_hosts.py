"""Several hosts: one is dropped, cut off, slowed down or comes back, without the user's doing.

Hosts are network namespaces. CI drops one; ``--all-hosts`` tries the rest, and ``-s`` shows how
long each took: ``python -m pytest packages/polyshard-demo/tests/test_hosts.py --all-hosts -s``
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from fault_cluster import Job, job, recovery, starts
from fault_jobs import Agent, Undisturbed, losses, training, wait_for

from polyshard_testing.hosts import NoHostsError

pytestmark = pytest.mark.slow

STEPS = 150
STEPPED = r"^step +([3-9]\d|\d{3})/"  # not at once, so that there is something to continue from
HSDP = "--shard-ranks=2"
CLOSE = 1e-3
"""How close losses are when other numbers of ranks have added them up."""


@pytest.fixture
def thorough(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("all_hosts"):
        pytest.skip("takes about half a minute; run with --all-hosts")


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a job on so many hosts with so many ranks each, and wait until it trains."""
    with ExitStack() as opened:

        def started(hosts: int, per_host: int, *options: str) -> Job:
            train = [*training(tmp_path, STEPS), "--timeout=30", *options]
            try:
                running = opened.enter_context(job(hosts, per_host, train))
            except NoHostsError as error:
                pytest.skip(str(error))
            wait_for(list(running.agents.values()), STEPPED)
            return running

        yield started


def finish(*agents: Agent, seconds: float = 120) -> None:
    """Wait for the end of the training."""
    for one in agents:
        assert one.process.wait(seconds) == 0, one.said()


@pytest.mark.thorough  # of what one machine can try, test_kills does so in the gate
def test_a_host_is_dropped(start: Start, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """One of two, which hold a copy of the model each."""
    running = start(2, 2, HSDP)
    stays, lost = running.network.hosts
    fault = time.monotonic()
    lost.crash()
    print(f"\na host of two is dropped: {recovery([running.on(stays)], fault)}")
    finish(running.on(stays))
    assert losses(tmp_path) == pytest.approx(losses(undisturbed(STEPS)), rel=CLOSE)


@pytest.mark.usefixtures("thorough")
def test_the_first_of_three_is_dropped(
    start: Start, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """It had rank 0; all three share one copy of the model."""
    running = start(3, 1)
    lost, *stay = running.network.hosts
    left = [running.on(host) for host in stay]
    fault = time.monotonic()
    lost.crash()
    print(f"\nthe first host of three is dropped: {recovery(left, fault)}")
    finish(*left)
    assert losses(tmp_path) == pytest.approx(losses(undisturbed(STEPS)), rel=CLOSE)


@pytest.mark.usefixtures("thorough")
def test_a_rank_is_killed(start: Start, tmp_path: Path, undisturbed: Undisturbed) -> None:
    running = start(2, 2, HSDP)
    agents = [running.on(host) for host in running.network.hosts]
    fault = time.monotonic()
    os.kill(agents[1].ranks()[0], signal.SIGKILL)
    print(f"\na rank is killed: {recovery(agents, fault)}")
    finish(*agents)
    assert losses(tmp_path) == losses(undisturbed(STEPS, 4, HSDP))


@pytest.mark.usefixtures("thorough")
def test_a_link_is_cut(start: Start, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Packets are lost without a word; who is cut off ends by itself."""
    running = start(2, 2, HSDP)
    network = running.network
    stays, lost = network.hosts
    fault = time.monotonic()
    network.cut(lost)
    print(f"\na link is cut: {recovery([running.on(stays)], fault)}")
    assert running.on(lost).process.wait(60) != 0
    print(f"the host that is cut off ends after {time.monotonic() - fault:.1f} s")
    assert lost.processes() == []
    finish(running.on(stays))
    assert losses(tmp_path) == pytest.approx(losses(undisturbed(STEPS)), rel=CLOSE)


@pytest.mark.usefixtures("thorough")
def test_a_link_is_slow(start: Start, tmp_path: Path, undisturbed: Undisturbed) -> None:
    running = start(2, 2, HSDP)
    running.network.slow(running.network.hosts[1], "10mbit")
    begun = time.monotonic()
    agents = list(running.agents.values())
    finish(*agents)
    print(f"\na link is slow: {time.monotonic() - begun:.1f} s for the other {STEPS - 30} steps")
    assert starts(agents) == 1, "nothing was restarted"
    assert losses(tmp_path) == losses(undisturbed(STEPS, 4, HSDP))


@pytest.mark.usefixtures("thorough")
def test_a_host_comes_back(start: Start, tmp_path: Path, undisturbed: Undisturbed) -> None:
    running = start(2, 2, HSDP, "--steps=600")
    stays, lost = running.network.hosts
    fault = time.monotonic()
    lost.crash()
    recovery([running.on(stays)], fault)
    back = time.monotonic()
    running.start(lost)
    agents = [running.on(stays), running.on(lost)]
    print(f"\na host comes back: {recovery(agents, back)}")
    wait_for(agents, "engine polyshard, 4 ranks", back)
    finish(*agents)
    assert losses(tmp_path) == pytest.approx(losses(undisturbed(600)), rel=CLOSE)


@pytest.mark.usefixtures("thorough")
def test_the_store_is_lost(start: Start, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Hosts cannot find each other without it: all end, and a job started anew continues."""
    running = start(2, 2, HSDP)
    fault = time.monotonic()
    running.network.switch.crash()
    for host in running.network.hosts:
        assert running.on(host).process.wait(60) != 0
    print(f"\nthe store is lost: all have ended after {time.monotonic() - fault:.1f} s")
    assert [host.processes() for host in running.network.hosts] == [[], []]
    again = start(2, 2, HSDP)
    wait_for(list(again.agents.values()), "going on after step")
    finish(*again.agents.values())
    assert losses(tmp_path) == losses(undisturbed(STEPS, 4, HSDP))
