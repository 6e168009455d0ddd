"""A Ray cluster of network namespaces: a head on the switch, which computes nothing, and nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from launch_hosts import named, write_names
from launch_ranks import FOLDER

from polyshard_testing.hosts import INTERFACE, Host, Network, network

PORT = 6379
SCRIPT = FOLDER / "ray_train.py"
GROUP = FOLDER / "ray_groups.py"
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_DISABLE_MEMORY_MONITOR": "1",
    # A node that does not answer is given up after about 5 s.
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}
MEMORY = 100 * 2**20
"""Bytes of each node's store of objects; Ray takes no less than 75 MiB."""


@dataclass(frozen=True)
class RayCluster:
    """Nodes of as many CPUs each, which know each other by name."""

    network: Network
    folder: Path

    @property
    def address(self) -> str:
        """Of the head."""
        return f"{self.network.switch.address}:{PORT}"

    def run(self, log: Path, script: Path, *options: str) -> subprocess.Popen[bytes]:
        """Start a script beside the head."""
        line = [*self.on(self.network.switch), sys.executable, str(script), *options]
        with log.open("wb") as said:
            return subprocess.Popen(
                line, env=self.environment(), stdout=said, stderr=subprocess.STDOUT
            )

    def on(self, host: Host) -> list[str]:
        """What a command starts with to run on a host."""
        return named(host, self.folder / "hosts")

    def environment(self) -> dict[str, str]:
        """Variables of everything there."""
        return {**os.environ, **QUIET, "GLOO_SOCKET_IFNAME": INTERFACE, "TMPDIR": str(self.folder)}

    def start(self, host: Host, *options: str) -> None:
        """Start Ray on a host."""
        line = [
            *(*self.on(host), *RAY, "start", f"--node-ip-address={host.address}"),
            *(f"--object-store-memory={MEMORY}", "--disable-usage-stats", *options),
        ]
        done = subprocess.run(
            line, env=self.environment(), capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def ray_cluster(count: int, cpus: int = 1) -> Iterator[RayCluster]:
    """A cluster of so many nodes of ``cpus`` each, and the head; at the end all of it is killed.

    Raises:
        NoHostsError: when this machine cannot have them.
    """
    with ExitStack() as opened:
        # Names of sockets below have to be short.
        folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        opened.callback(shutil.rmtree, folder, ignore_errors=True)
        made = RayCluster(opened.enter_context(network(count)), folder)
        write_names(folder / "hosts", made.network)
        made.start(
            made.network.switch,
            *("--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false"),
            f"--temp-dir={folder}",
        )
        for host in made.network.hosts:
            made.start(host, f"--address={made.address}", f"--num-cpus={cpus}")
        yield made
