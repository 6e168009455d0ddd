"""What ``polyshard doctor`` looks at: one function each, which says what it found."""

from __future__ import annotations

import os
import platform
import resource
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
import torch.distributed as dist

from polyshard.installed import NEWEST_TORCH, OLDEST_TORCH, tested_torch, torch_release

OPEN_FILES = 1024
"""A rank needs a socket for every peer of every process group, beside the files of the job."""
SHARED_BYTES = 64 << 20
"""Data loaders hand tensors over in shared memory, so does NCCL; containers often have 64 MB."""
DISK_BYTES = 1 << 30
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


class State(Enum):
    """How bad it is."""

    FINE = "✔"
    WARNING = "!"
    PROBLEM = "✘"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor."""

    what: str
    state: State
    text: str


def torch_build() -> Iterator[Finding]:
    """The versions of Python and torch."""
    found = f"torch {torch.__version__}, Python {platform.python_version()}"
    tested = tested_torch()
    if torch_release() < OLDEST_TORCH:
        yield Finding("torch", State.PROBLEM, f"{found}: too old, {tested} are tested")
    elif torch_release() > NEWEST_TORCH:
        yield Finding("torch", State.WARNING, f"{found}: newer than {tested}, which are tested")
    else:
        yield Finding("torch", State.FINE, found)


def backends() -> Iterator[Finding]:
    """What can move bytes between ranks."""
    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding(
            "backend", State.PROBLEM, "this build of torch has no gloo; use an official one"
        )
        return
    if not torch.accelerator.is_available():
        yield Finding("backend", State.FINE, "gloo; no accelerator")
        return
    kind = torch.accelerator.current_accelerator()
    devices = f"{torch.accelerator.device_count()} x {kind.type if kind else 'accelerator'}"
    if kind is not None and kind.type == "cuda" and not dist.is_nccl_available():
        yield Finding("backend", State.PROBLEM, f"{devices}, but this build of torch has no NCCL")
    else:
        yield Finding("backend", State.FINE, f"gloo, and the backend of {devices}")


def interfaces() -> Iterator[Finding]:
    """Whether ranks on other machines could reach this one under the name it gives itself."""
    known = [name for _, name in socket.if_nameindex()]
    chosen = {name: os.environ[name] for name in INTERFACES if os.environ.get(name)}
    for variable, value in chosen.items():
        given = value.lstrip("=^").split(",")
        exact = not variable.startswith("NCCL") or value.startswith("=")
        wrong = [name for name in given if not _is_known(name, known, exact=exact)]
        if wrong and not value.startswith("^"):
            missing = f"there is no interface {', '.join(wrong)}, only {', '.join(known)}"
            yield Finding("network", State.PROBLEM, f"{variable}={value}: {missing}")
            return
    host = socket.gethostname()
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError as error:
        yield Finding(
            "network", State.PROBLEM, f"{_unreachable(host)}, which has no address: {error}"
        )
        return
    own = sorted(address for address in addresses if _is_own(address))
    if not own and not chosen:
        others = f"whose addresses {', '.join(sorted(addresses))} are not this machine's"
        yield Finding("network", State.PROBLEM, f"{_unreachable(host)}, {others}")
    elif own and all(address.startswith(("127.", "::1")) for address in own) and not chosen:
        text = f"{host} is {', '.join(own)}: for ranks on several machines set GLOO_SOCKET_IFNAME"
        yield Finding("network", State.WARNING, text)
    else:
        names = ", ".join(f"{name}={value}" for name, value in chosen.items())
        yield Finding("network", State.FINE, names or f"{host} is {', '.join(own)}")


def _unreachable(host: str) -> str:
    return (
        "set GLOO_SOCKET_IFNAME to the interface that ranks should use, or fix /etc/hosts: "
        f"this machine calls itself {host}"
    )


def _is_known(name: str, known: list[str], *, exact: bool) -> bool:
    """NCCL takes the beginning of a name too, the others do not."""
    return name in known or (not exact and any(one.startswith(name) for one in known))


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def limits() -> Iterator[Finding]:
    """How many files and sockets a rank may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft:,} open files"
    if soft < OPEN_FILES:
        remedy = f"; run 'ulimit -n {min(hard, 65536)}' before you start ranks"
        yield Finding("limits", State.PROBLEM, text + remedy)
    else:
        yield Finding("limits", State.FINE, text)


def shared_memory(path: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Room for tensors that processes hand to each other."""
    if not path.exists():
        yield Finding("shared memory", State.WARNING, f"there is no {path} on this system")
        return
    free = _free_bytes(path)
    text = f"{free / 2**20:,.0f} MiB free in {path}"
    if free < SHARED_BYTES:
        remedy = "; in a container, start it with --shm-size=1g or --ipc=host"
        yield Finding("shared memory", State.PROBLEM, text + remedy)
    else:
        yield Finding("shared memory", State.FINE, text)


def disk(path: Path) -> Iterator[Finding]:
    """What a directory could hold of checkpoints, or of shards and optimizer state."""
    try:
        free = _free_bytes(path)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"polyshard")
    except OSError as error:
        yield Finding("disk", State.PROBLEM, f"{path} cannot be written to: {error}")
        return
    direct = "direct access" if _is_direct(path) else "no direct access: reads go through memory"
    text = f"{free / 2**30:,.1f} GiB free in {path}, {direct}"
    yield Finding("disk", State.WARNING if free < DISK_BYTES else State.FINE, text)


def _free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _is_direct(path: Path) -> bool:
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return False
    with tempfile.NamedTemporaryFile(dir=path) as file:
        try:
            os.close(os.open(file.name, os.O_RDWR | flag))
        except OSError:
            return False
    return True
