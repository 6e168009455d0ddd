"""Ranks that may be killed: forked from a process that has imported everything, within moments."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from toy_meeting import await_all

PRELOADED = [
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "polyshard",
    "polyshard_checkpoint",
    "polyshard_demo.model",
    "polyshard_offload",
    "polyshard_quantized",
    "polyshard_tensor_parallel",
]
"""Nothing of it starts a thread, without which forking would not be safe."""


BACKENDS = {"cpu": "gloo", "sim": "cpu:gloo,sim:simccl", "cuda": "cpu:gloo,cuda:nccl"}
DEVICE = "POLYSHARD_FAULTS_DEVICE"
"""In the environment of each rank."""
PATIENT_SECONDS = 120.0
"""Seconds. Ranks take four of them on a quiet machine, and fifty beside two gates."""


def device_of_ranks() -> str:
    """Where a rank of these computes."""
    return os.environ[DEVICE]


class SilentError(AssertionError):
    """Ranks that were expected to answer did not, or failed in another way than was meant."""


@dataclass(frozen=True)
class Job:
    """What one rank runs, and in which process group."""

    rank: int
    size: int
    port: int
    keeps_store: bool
    timeout_seconds: float
    device: str
    work: Callable[..., Any]
    args: tuple[Any, ...]


class Ranks:
    """Processes of one process group, whose store is kept here or by rank 0."""

    def __init__(
        self, size: int, timeout_seconds: float, *, keeper: bool = False, device: str = "cpu"
    ) -> None:
        """``timeout_seconds`` is the process group's; with ``keeper`` rank 0 keeps the store.

        With ``device="sim"`` each has a simulated device; on ``"cuda"`` all may share one.
        """
        self.size, self._device = size, device
        self._timeout = timeout_seconds
        self._keeper = keeper

    def run(
        self,
        work: Callable[..., Any],
        *args: Any,
        ended: Collection[int] = (),
        patience: float = PATIENT_SECONDS,
    ) -> list[Any]:
        """Call ``work(rank, size, *args)`` on every rank; the answers, ``None`` of ``ended`` ones.

        Args:
            work: a function of a module that ranks can import.
            args: picklable.
            ended: ranks that will not answer.
            patience: seconds to wait for the others, which start first.

        Raises:
            SilentError: when another rank does not answer, or raises.
        """
        with self._started(work, args) as pipes:
            awaited = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in ended}
            return _answers(awaited, self.size, patience)

    @contextmanager
    def _started(self, work: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[list[Any]]:
        import torch.distributed as dist

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        # Nothing listens at the port in between, and ranks wait until rank 0 does.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
        if self._keeper:
            del store
        started: list[tuple[BaseProcess, Connection]] = []
        try:
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                keeps = self._keeper and rank == 0
                job = Job(rank, self.size, port, keeps, self._timeout, self._device, work, args)
                process: BaseProcess = context.Process(
                    target=_serve, args=(job, theirs), daemon=True
                )
                process.start()
                theirs.close()
                started.append((process, ours))
            yield [pipe for _, pipe in started]
        finally:
            for process, pipe in started:
                process.kill()
                process.join()
                pipe.close()


def _answers(awaited: dict[Any, int], size: int, patience: float) -> list[Any]:
    answers: list[Any] = [None] * size
    failed: list[str] = []
    deadline = time.monotonic() + patience
    while awaited and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(awaited), left):
            assert isinstance(pipe, Connection)
            rank = awaited.pop(pipe)
            try:
                is_error, answer = pipe.recv()
            except EOFError:
                is_error, answer = True, "ended without an answer"
            answers[rank] = answer
            if is_error:
                failed.append(f"--- rank {rank} ---\n{answer}")
                deadline = min(deadline, time.monotonic() + 5.0)
    failed += [f"--- rank {rank} did not answer ---" for rank in awaited.values()]
    if failed:
        raise SilentError("\n".join(failed))
    return answers


def _serve(job: Job, pipe: Connection) -> None:
    """What the interpreter does with a script: uncaught exceptions end it, in its way."""
    import torch
    import torch.distributed as dist

    from polyshard_resilience import enable

    enable()
    torch.set_num_threads(1)
    timeout = timedelta(seconds=job.timeout_seconds)
    store = dist.TCPStore(
        "127.0.0.1", job.port, None, job.keeps_store, timeout, wait_for_workers=False
    )
    os.environ[DEVICE] = job.device
    if job.device == "sim":
        import polyshard_sim

        polyshard_sim.enable(mode="threads", jitter_us=20, devices=1)
    dist.init_process_group(
        BACKENDS[job.device], store=store, rank=job.rank, world_size=job.size, timeout=timeout
    )
    await_all("joined", job.size)  # a rank that dies earlier ends the others, which still connect
    torch.manual_seed(0)
    code = 0
    try:
        pipe.send((False, job.work(job.rank, job.size, *job.args)))
        pipe.poll(None)  # stay until the others have answered
    except EOFError:
        pass
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:
        if not isinstance(error, Uncaught):
            pipe.send((True, traceback.format_exc()))
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    os._exit(code)


class Uncaught(ArithmeticError):  # noqa: N818  (an exception of the training, not of the harness)
    """It is not caught, and that is meant."""


Uncaught.__name__ = "ArithmeticError"
