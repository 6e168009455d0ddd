"""A rank: answers one command after the other until its pipe is closed."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyshard_cli.compare.ranks.messages import Failure, Start

if TYPE_CHECKING:
    import torch

__all__ = ["STORE", "output_of", "serve"]

STORE = "store"
COMMANDS = ("step", "memory", "plan")


def serve(start: Start, environment: dict[str, str], pipe: Connection) -> None:
    """Tell that the rank is there, build the job, tell its facts, then do what is asked.

    Commands are tuples of a method of ``Session`` and its arguments. Answers are what that
    returns; or a ``Failure``, after which nothing else is answered.
    """
    os.environ.clear()  # that of a fork server is of when it started
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the process that leads it
    _print_to(output_of(start.folder, start.rank))
    try:
        _serve(start, pipe)
    except BaseException as error:  # a script may leave with SystemExit, say
        pipe.send(Failure.of(start.rank, error))


def output_of(folder: str, rank: int) -> Path:
    """Where a rank prints to."""
    return Path(folder) / f"rank{rank}.txt"


def _serve(start: Start, pipe: Connection) -> None:
    import torch

    from polyshard_cli.compare.engines.built import Place
    from polyshard_cli.compare.training.session import Session
    from polyshard_cli.compare.training.warming import warm_up

    torch.set_num_threads(start.threads)
    device = torch.device(start.settings.device)
    if device.type != "cpu":
        device = torch.device(device.type, start.rank)
        torch.accelerator.set_device_index(device)
    if start.spec.kind != "single":
        _join(start, device)
    warm_up(device)
    pipe.send(None)
    session = Session(start.settings, start.spec, Place(start.rank, start.ranks, device))
    pipe.send(session.facts)
    for name, *arguments in iter(lambda: _next_of(pipe), None):
        assert name in COMMANDS
        pipe.send(getattr(session, name)(*arguments))


def _next_of(pipe: Connection) -> tuple[Any, ...] | None:
    """The next command; none when the pipe is closed. A job may raise ``EOFError`` too."""
    try:
        command: tuple[Any, ...] = pipe.recv()
    except EOFError:
        return None
    return command


def _join(start: Start, device: torch.device) -> None:
    import torch.distributed as dist

    if find_spec("polyshard_resilience"):
        import_module("polyshard_resilience").enable()  # a job in which a rank fails ends at once
    own = "" if device.type == "cpu" else dist.get_default_backend_for_device(device)
    dist.init_process_group(
        f"cpu:gloo,{device.type}:{own}" if own else "gloo",
        store=dist.FileStore(str(Path(start.folder) / STORE), start.ranks),
        rank=start.rank,
        world_size=start.ranks,
        timeout=timedelta(seconds=start.settings.timeout),
    )


def _print_to(path: Path) -> None:
    """So that a table, or JSON, is all that the terminal shows."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
