"""One rank of a run: its place among the others, and its device."""

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from polyshard_demo.errors import DemoError
from polyshard_demo.settings import DeviceName
from polyshard_resilience import enable

__all__ = ["Worker", "fix_kernels", "join"]

T = TypeVar("T")

PEER_GONE = ("closed by peer", "reset by peer", "remote process exited")
GRACE_SECONDS = 3.0


@dataclass(frozen=True)
class Worker:
    """This process within the run."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this rank prints and writes files for all."""
        return self.rank == 0

    def mean(self, value: torch.Tensor) -> float:
        """Mean of a scalar over the ranks, added up in float64."""
        total = value.detach().double()
        dist.all_reduce(total)
        return float(total) / self.world_size

    def exact_mean(self, values: Sequence[float]) -> float:
        """Mean of all values of all ranks, rounded once: the same however ranks share them."""
        every = [value for own in self.gather(values) for value in own]
        return math.fsum(every) / len(every)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return cast("list[T]", values)


@contextmanager
def join(device: DeviceName, timeout: int = 0) -> Iterator[Worker]:
    """Join the process group that the launcher's environment describes; leave it at the end.

    Args:
        device: where to compute.
        timeout: seconds that a transfer may take; 0 is torch's default.
    """
    chosen = _choose_device(device)
    backend = "gloo"
    if chosen.type != "cpu":
        torch.accelerator.set_device_index(chosen)
        backend = f"cpu:gloo,{chosen.type}:{dist.get_default_backend_for_device(chosen)}"
    enable()
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout) if timeout else None)
    try:
        yield Worker(dist.get_rank(), dist.get_world_size(), chosen)
    except RuntimeError as error:
        if any(sign in str(error) for sign in PEER_GONE) and not _is_restarted():
            time.sleep(GRACE_SECONDS)  # the rank that broke off knows why: let it be heard first
        raise
    # Not in a `finally`: after an error the peers may hang in a collective, and the launcher,
    # which sees this process die, ends them.
    dist.destroy_process_group()


def fix_kernels(device: torch.device) -> None:
    """Have kernels cut their work alike, however many ranks there are.

    On the CPU by the number of threads: ``OMP_NUM_THREADS``, or one. On an accelerator only those
    that are deterministic run.
    """
    if device.type == "cpu":
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
    else:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for then
        torch.use_deterministic_algorithms(True)


def _is_restarted() -> bool:
    """Whether the launcher goes on after an error; then every rank is heard in the log."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def _choose_device(name: DeviceName) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise DemoError("--device cuda: torch finds no CUDA device; use --device cpu")
    if name == "cpu" or not available:
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise DemoError(
            f"local rank {local_rank} has no CUDA device, there are {torch.cuda.device_count()}; "
            "lower --ranks or use --device cpu"
        )
    return torch.device("cuda", local_rank)
