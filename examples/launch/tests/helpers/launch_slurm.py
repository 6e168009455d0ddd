"""A Slurm cluster of network namespaces: a controller on the switch, a slurmd on every host.

Everything is its own: munge's key and socket, configuration, spool folders. Nothing of a Slurm that
the machine may have is read or written, and nothing listens outside of the namespaces.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from launch_hosts import named, write_names
from launch_ranks import FOLDER, SCRIPT, wait_until

from polyshard_testing.hosts import INTERFACE, Network, NoHostsError, network

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "unshare")
SBATCH = FOLDER / "slurm" / "train.sbatch"
GROUPS = FOLDER / "slurm" / "groups.sbatch"
PORTS = {"controller": 6817, "first node": 6820}

CONFIGURATION = """
ClusterName=polyshard
SlurmctldHost={name}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that is requeued waits as long as credentials are good for.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/linear
SlurmdParameters=config_overrides
# A host that does not answer is given up after so many seconds.
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=5
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
JobRequeue=1
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class NoSlurmError(Exception):
    """Why this machine cannot have a cluster."""


@dataclass(frozen=True)
class Cluster:
    """Nodes ``node1`` and on, one a host."""

    network: Network
    folder: Path

    def command(self, *line: str) -> str:
        """What a command of Slurm's prints on the controller's host."""
        done = subprocess.run(
            [*self.network.switch.prefix, *line],
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}\n{self.said()}"
        return done.stdout.strip()

    def environment(self) -> dict[str, str]:
        """Variables of commands, and so of jobs."""
        inside = {"SLURM_CONF": str(self.folder / "slurm.conf"), "GLOO_SOCKET_IFNAME": INTERFACE}
        return {**os.environ, **inside, "PYTHON": sys.executable, "SCRIPT": str(SCRIPT)}

    @property
    def is_idle(self) -> bool:
        """Whether all nodes are there, and have nothing to do."""
        states = self.command("sinfo", "--noheader", "--format=%T %D")
        return states.split() == ["idle", str(len(self.network.hosts))]

    def submit(self, *options: str, train: list[str], batch: Path = SBATCH) -> str:
        """Hand in a batch script; the job's number."""
        log = f"--output={self.folder}/job.log"
        return self.command("sbatch", "--parsable", log, *options, str(batch), *train)

    def srun(self, *options: str, run: list[str]) -> int:
        """Run ranks on two nodes, without a batch script; the exit code."""
        place = (
            "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS"
            ' MASTER_ADDR=node1 MASTER_PORT=29500; exec "$@"'
        )
        line = ["srun", "--nodes=2", "--ntasks=2", *options, "bash", "-c", place, "rank", *run]
        with self.log.open("ab") as log:
            return subprocess.run(
                [*self.network.switch.prefix, *line],
                env=self.environment(), stdout=log, stderr=log, check=False, timeout=120,
            ).returncode  # fmt: skip

    def job(self, number: str, key: str) -> str:
        """What ``scontrol show job`` says of one thing."""
        shown = self.command("scontrol", "--oneliner", "show", "job", number)
        return dict(pair.split("=", 1) for pair in shown.split() if "=" in pair)[key]

    def state(self, number: str) -> str:
        """Of a job."""
        return self.job(number, "JobState")

    def finish(self, number: str, seconds: float = 240) -> None:
        """Wait until a job is done, however often it has to be started."""
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        try:
            wait_until(lambda: self.state(number) in ended, "end of the job", seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.said()}") from error
        assert self.state(number) == "COMPLETED", self.said()

    @property
    def log(self) -> Path:
        """What jobs have printed."""
        return self.folder / "job.log"

    def said(self) -> str:
        """Everything, for people."""
        logs = sorted(self.folder.glob("*.log"))
        tails = (f"== {log.name}\n{log.read_text('utf-8', 'replace')[-6000:]}" for log in logs)
        return "\n".join(tails)


@contextmanager
def cluster(count: int) -> Iterator[Cluster]:
    """A cluster of so many nodes; at the end every process of it is killed.

    Raises:
        NoSlurmError: saying what this machine lacks.
    """
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        raise NoSlurmError(f"{', '.join(missing)} not installed (Debian: slurm-wlm, munge)")
    if os.geteuid():
        raise NoSlurmError("slurmd and network namespaces need root")
    with ExitStack() as opened:
        # munge wants a folder that all users may enter, and no other may write into.
        folder = Path(
            opened.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", dir="/run"))
        )
        folder.chmod(0o755)
        try:
            hosts = opened.enter_context(network(count))
        except NoHostsError as error:
            raise NoSlurmError(str(error)) from error
        made = Cluster(hosts, folder)
        _configure(made)
        opened.enter_context(_daemon(made, *_munged(folder)))
        opened.enter_context(_daemon(made, *hosts.switch.prefix, "slurmctld", "-D"))
        for host in hosts.hosts:
            inside = named(host, folder / "hosts")
            opened.enter_context(_daemon(made, *inside, "slurmd", "-D"))
        wait_until(lambda: made.is_idle, "idle nodes", 60)
        yield made


def _configure(made: Cluster) -> None:
    switch, folder = made.network.switch, made.folder
    lines = [
        CONFIGURATION.format(
            name=socket.gethostname(),
            address=switch.address,
            port=PORTS["controller"],
            folder=folder,
        )
    ]
    for place, host in enumerate(made.network.hosts, 1):
        port = PORTS["first node"] + place
        lines.append(f"NodeName=node{place} NodeAddr={host.address} Port={port} CPUs=1")
        (folder / f"spool-node{place}").mkdir()
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    write_names(folder / "hosts", made.network)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(0o400)
    key.write_bytes(secrets.token_bytes(128))


def _munged(folder: Path) -> list[str]:
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
    own = [f"--{option}={folder}/munge.{end}" for option, end in files.items()]
    return ["munged", "--foreground", "--force", f"--log-file={folder}/munged.log", *own]


@contextmanager
def _daemon(made: Cluster, *command: str) -> Iterator[None]:
    name = next(part for part in command if part in NEEDED and part != "unshare")
    with (made.folder / f"{name}-printed.log").open("a") as log:
        process = subprocess.Popen(
            command, env=made.environment(), stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_until(lambda: process.poll() is not None or _is_up(made, name), name, 30)
        assert process.poll() is None, f"{name} has ended\n{made.said()}"
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_up(made: Cluster, name: str) -> bool:
    return name != "munged" or (made.folder / "munge.socket").exists()
