"""Fresh processes for a benchmark: gloo ranks, or one alone; bring back (rank 0's) answer."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def free_port() -> int:
    """A TCP port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _entry(rank: int, ranks: int, port: int, work: Callable[..., Any], args: Any, out: Any) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    try:
        answer = work(*args)
        if rank == 0:
            out.put(answer)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_ranks(ranks: int, work: Callable[..., Any], *args: Any) -> Any:
    """Call ``work(*args)`` on ``ranks`` fresh processes; return what rank 0's call returned."""
    os.environ["OMP_NUM_THREADS"] = "1"
    return _answer(_entry, (ranks, free_port(), work, args), ranks)


def _answer(entry: Callable[..., None], args: tuple[Any, ...], processes: int) -> Any:
    """Start ``entry(index, *args, queue)`` in each process; wait for all, and for the answer."""
    out = mp.get_context("spawn").SimpleQueue()
    context = mp.spawn(entry, (*args, out), nprocs=processes, join=False)
    answer = out.get() if _alive_until_answer(context, out) else None
    while not context.join():
        pass
    return answer


def _alone(_: int, work: Callable[..., Any], args: Any, out: Any) -> None:
    torch.set_num_threads(1)
    out.put(work(*args))


def run_alone(work: Callable[..., Any], *args: Any) -> Any:
    """Call ``work(*args)`` in a fresh process without a process group; return what it returned."""
    os.environ["OMP_NUM_THREADS"] = "1"
    return _answer(_alone, (work, args), 1)


def _alive_until_answer(context: Any, out: Any) -> bool:
    while out.empty():
        if context.join(timeout=0.1):
            return not out.empty()
    return True
