"""Starts the ranks of a run, or is one of them when torchrun has already started them."""

import logging
import multiprocessing
import os
import uuid
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from polyshard_demo.checkpoint import find_source
from polyshard_demo.engine import plugins_of
from polyshard_demo.errors import DemoError, RankError
from polyshard_demo.settings import Settings
from polyshard_demo.text import load_corpus
from polyshard_demo.train import run_worker

__all__ = ["check", "launch", "run_local_ranks"]


def launch(settings: Settings) -> None:
    """Run a training to its end.

    Under torchrun this process is one of its `settings.ranks` ranks. Otherwise that many local
    processes are started by torch's elastic launcher.

    Raises:
        DemoError: Settings, text or checkpoint cannot be used; found before any rank starts.
        PlanError: A plugin refuses its settings, or is not installed; likewise.
        RankError: A rank died. The others have been ended; nothing is left running.
    """
    check(settings)
    if "RANK" in os.environ:
        record(run_worker)(settings)
    else:
        run_local_ranks(run_worker, settings)


def check(settings: Settings) -> None:
    """Find in this process, with a short message, what every rank would trip over."""
    plugins_of(settings)
    find_source(settings, load_corpus(settings.text, settings.sequence))
    # A store that torchrun shares with ranks outlives them. Ranks of later starts find in it the
    # addresses of those that are gone, connect to these, and fail until no restarts are left.
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise DemoError(
            f"torchrun --max-restarts {restarts}: it shares its store with the ranks, and those "
            "that it restarts would connect to ranks that are gone; set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and use --standalone or --rdzv-backend=c10d"
        )


def run_local_ranks(work: Callable[[Settings], None], settings: Settings) -> None:
    """Call `work`, which must be importable, in `settings.ranks` new processes; wait for all.

    Raises:
        RankError: One of them failed; the others have been ended.
    """
    multiprocessing.set_forkserver_preload(["polyshard_demo.train"])  # one import for all ranks
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=settings.ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        start_method="forkserver",
    )
    logging.disable()  # the launcher would log the traceback that `RankError` has
    try:
        elastic_launch(config, work)(settings)
    except ChildFailedError as error:
        raise _rank_error(error) from None
    except SignalException as error:
        raise KeyboardInterrupt(error.sigval.name) from None
    finally:
        logging.disable(logging.NOTSET)


def _rank_error(error: ChildFailedError) -> RankError:
    """The first failure, with its traceback where the rank could still write one."""
    rank, failure = error.get_first_failure()
    said: Any = failure.message  # of a killed rank a sentence, of others what they have recorded
    if isinstance(said, dict):
        said = said.get("extraInfo", {}).get("py_callstack") or said.get("message")
    return RankError(f"rank {rank} failed (exit code {failure.exitcode}):\n{said}")
