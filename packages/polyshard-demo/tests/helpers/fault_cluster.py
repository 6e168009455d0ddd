"""A job on several hosts, exactly as docs/how-to/several-hosts.md says to start it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fault_jobs import EXAMPLES, POLL, SCRIPT, Agent, agent

from polyshard_testing.hosts import INTERFACE, Host, Network, network

PORT = 29400
STORE = EXAMPLES / "rendezvous_store.py"
RENDEZVOUS = (
    "is_host=false,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,"
    "read_timeout=10"
)
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": INTERFACE}
RETRIES = "net.ipv4.tcp_retries2=5"
"""The kernel gives a silent peer up after about 13 s, not 15 minutes."""
GONE = r"Traceback|Error|failed \(exitcode|closing signal"
STEPPED = r"^step +\d+/"


@dataclass(frozen=True)
class Job:
    """A training with an agent on every host, and the store on the switch."""

    network: Network
    per_host: int
    train: Sequence[str]
    agents: dict[str, Agent]
    store: subprocess.Popen[str]
    _opened: ExitStack
    script: Path = SCRIPT
    fewest_hosts: int = 1

    def start(self, host: Host) -> None:
        """Start the agent of a host."""
        torchrun = [
            f"--nnodes={self.fewest_hosts}:{len(self.network.hosts)}",
            f"--nproc-per-node={self.per_host}",
            "--max-restarts=5",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.network.switch.address}:{PORT}",
            "--rdzv-id=job",
            f"--rdzv-conf={RENDEZVOUS}",
            f"--local-addr={host.address}",
        ]
        started = agent(torchrun, self.train, host.prefix, ENVIRONMENT, self.script)
        self.agents[host.name] = self._opened.enter_context(started)

    def on(self, host: Host) -> Agent:
        """The agent of a host."""
        return self.agents[host.name]

    def said(self) -> str:
        """Everything, for people."""
        return "\n\n".join(one.said() for one in self.agents.values())


@contextmanager
def job(
    hosts: int,
    per_host: int,
    train: Sequence[str],
    script: Path = SCRIPT,
    fewest_hosts: int = 1,
) -> Iterator[Job]:
    """A job that has just been started on new hosts, and continues with ``fewest_hosts`` of them.

    Raises:
        NoHostsError: when this machine cannot have them.
    """
    with ExitStack() as opened:
        joined = opened.enter_context(network(hosts))
        for host in joined.hosts:
            _run(host, "sysctl", "-w", RETRIES)
        store = opened.enter_context(_store(joined.switch))
        running = Job(joined, per_host, train, {}, store, opened, script, fewest_hosts)
        for host in joined.hosts:
            running.start(host)
        yield running


@contextmanager
def _store(host: Host) -> Iterator[subprocess.Popen[str]]:
    command = [*host.prefix, sys.executable, str(STORE), host.address, str(PORT)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("serving")
            yield process
        finally:
            process.kill()


def _run(host: Host, *command: str) -> None:
    with suppress(subprocess.CalledProcessError):  # then faults take longer to be noticed
        subprocess.run([*host.prefix, *command], check=True, capture_output=True)


@dataclass(frozen=True)
class Recovery:
    """Seconds from a fault: to the first word of it, to new ranks on all hosts, to their step."""

    error: float
    restart: float
    step: float

    def __str__(self) -> str:
        return f"error {self.error:.1f} s, restart {self.restart:.1f} s, step {self.step:.1f} s"


def recovery(agents: Sequence[Agent], fault: float, seconds: float = 120) -> Recovery:
    """Wait until ``agents`` have got over what happened at ``fault``.

    Raises:
        TimeoutError: with everything that was said.
        ChildProcessError: likewise, when all agents have ended instead.
    """
    before = {pid for one in agents for pid in one.ranks()}
    restart = None
    while time.monotonic() < fault + seconds:
        if restart is None and all(set(one.ranks()) - before for one in agents):
            restart = time.monotonic()
        resumed = _first(agents, "going on after", fault)
        stepped = resumed and _first(agents, STEPPED, resumed)
        if restart and stepped:
            error = _first(agents, GONE, fault) or restart
            return Recovery(error - fault, restart - fault, stepped - fault)
        if all(one.process.poll() is not None for one in agents):
            raise ChildProcessError("\n\n".join(one.said() for one in agents))
        time.sleep(POLL)
    raise TimeoutError("\n\n".join(one.said() for one in agents))


def _first(agents: Sequence[Agent], pattern: str, since: float) -> float | None:
    found = [line.time for one in agents if (line := one.first(pattern, since)) is not None]
    return min(found, default=None)


def starts(agents: Sequence[Agent]) -> int:
    """How often the training was started."""
    lines = [line for one in agents for line in one.lines]
    return sum(re.search("^model .* parameters, engine", line.text) is not None for line in lines)
