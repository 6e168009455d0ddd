"""Two or four local ranks for a script that was not started by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import torch.distributed as dist

from polyshard_resilience import enable


def run(script: Callable[[], list[float]], count: int) -> None:
    """Call ``script`` on each rank; the first prints the losses it returns, one a line.

    Args:
        script: to be called in a process group; returns losses that are the same on all ranks.
        count: of the ranks that are started, unless torchrun has started this one.
    """
    if "LOCAL_RANK" not in os.environ:
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}")
        sys.exit(subprocess.call([sys.executable, *torchrun, *sys.argv]))
    enable()
    dist.init_process_group("gloo")
    for step, loss in enumerate(script()):
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss!r}")
    dist.barrier()  # a rank that leaves first takes connections away from those that still use them
    dist.destroy_process_group()
