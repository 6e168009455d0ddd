"""How a rank joins the others, and what they tell each other."""

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyshard_cli.compare.engines.built import Place
from polyshard_cli.compare.ranks.crew import threads_of_rank
from polyshard_cli.compare.ranks.messages import PEER_SIGNS
from polyshard_demo.errors import DemoError
from polyshard_demo.settings import DeviceName, Settings
from polyshard_resilience import enable

__all__ = ["fix_kernels", "gather", "join", "mean"]

GRACE_SECONDS = 3.0


@contextmanager
def join(settings: Settings) -> Iterator[Place]:
    """Join the process group that the launcher's environment describes; leave it at the end."""
    device, seconds = _choose_device(settings.device), settings.timeout
    fix_kernels(device, reproducible=bool(settings.reproducible))
    backend = "gloo"
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    enable()
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds) if seconds else None)
    try:
        yield Place(dist.get_rank(), dist.get_world_size(), device)
    except RuntimeError as error:
        is_restarted = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
        if any(sign in str(error) for sign in PEER_SIGNS) and not is_restarted:
            time.sleep(GRACE_SECONDS)  # the rank that broke off knows why: let it be heard first
        raise
    # Not in a `finally`: after an error the peers may hang in a collective, and the launcher,
    # which sees this process die, ends them.
    dist.destroy_process_group()


def gather(value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def mean(values: Sequence[Tensor]) -> float:
    """Mean of all scalars of all ranks, rounded once: the same however ranks share them."""
    every = [value for own in gather([float(value.detach()) for value in values]) for value in own]
    return math.fsum(every) / len(every)


def fix_kernels(device: torch.device, *, reproducible: bool) -> None:
    """Share the cores; or have kernels cut their work alike, however many ranks there are.

    On the CPU the latter goes by the number of threads: ``OMP_NUM_THREADS``, or one. On an
    accelerator only kernels that are deterministic run then.
    """
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    is_given = "OMP_NUM_THREADS" in os.environ
    torch.set_num_threads(1 if reproducible and not is_given else threads_of_rank(ranks_here))
    if reproducible and device.type != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for then
        torch.use_deterministic_algorithms(True)


def _choose_device(name: DeviceName) -> torch.device:
    count, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    if name == "cpu" or (name == "auto" and not count):
        return torch.device("cpu")
    if local_rank >= count:
        raise DemoError(
            f"--device {name}: local rank {local_rank} has no CUDA device, torch finds {count}; "
            "lower --ranks or use --device cpu"
        )
    return torch.device("cuda", local_rank)
