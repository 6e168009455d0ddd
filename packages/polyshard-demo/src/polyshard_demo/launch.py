"""Starts the ranks of a run, or is one of them when torchrun has already started them."""

import logging
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from polyshard_cli.compare.ranks.crew import threads_of_rank
from polyshard_demo.errors import DemoError, RankError
from polyshard_demo.settings import Settings

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

__all__ = ["launch", "run_local_ranks"]


def launch(settings: Settings) -> None:
    """Run a training to its end.

    Under torchrun this process is one rank and `settings.ranks` gives way to torchrun's number.
    Otherwise that many local processes are started by torch's elastic launcher.

    Raises:
        DemoError: Settings, text or checkpoint cannot be used; found before any rank starts.
        PlanError: A plugin refuses its settings, or is not installed; likewise.
        RankError: A rank died. The others have been ended; nothing is left running.
    """
    if "RANK" in os.environ:
        _run_under_torchrun(settings)
    else:
        from polyshard_demo.train import run_worker

        check(settings)
        run_local_ranks(run_worker, settings)


def check(settings: Settings) -> None:
    """Find in this process, with a short message, what every rank would trip over."""
    from polyshard_cli.plan.request.plugins import offloading, quantizing
    from polyshard_demo.checkpoint import find_source
    from polyshard_demo.plugins import slot_sampler
    from polyshard_demo.text import Windows, load_corpus
    from polyshard_demo.train import check_output

    if find_spec("matplotlib") is None:
        raise DemoError("matplotlib is missing; pip install matplotlib")
    if settings.quantize:
        quantizing(settings.quantize)
    if settings.offload:
        offloading(settings.offload)
    corpus = load_corpus(settings.text, settings.sequence)
    check_output(settings)
    if settings.reproducible:
        windows = Windows(corpus, settings.sequence)
        slot_sampler(windows, settings.batch, settings.reproducible, settings.seed)
    source = find_source(settings)
    if source is not None:
        source.check(settings, corpus)


def check_restarts() -> None:
    """Refuse a torchrun that is to restart ranks and could not.

    A store that it shares with them outlives them. Ranks of later starts find in it the addresses
    of those that are gone, connect to these, and fail until no restarts are left.

    Raises:
        DemoError: saying how to start it instead.
    """
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise DemoError(
            f"torchrun --max-restarts {restarts}: it shares its store with the ranks, and those "
            "that it restarts would connect to ranks that are gone; set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and use --standalone or --rdzv-backend=c10d"
        )


def _run_under_torchrun(settings: Settings) -> None:
    from torch.distributed.elastic.multiprocessing.errors import record

    from polyshard_demo.train import run_worker

    check_restarts()
    check(replace(settings, ranks=int(os.environ["WORLD_SIZE"])))
    record(run_worker)(settings)


def run_local_ranks(work: Callable[[Settings], None], settings: Settings) -> None:
    """Call `work`, which must be importable, in `settings.ranks` new processes; wait for all.

    Raises:
        RankError: One of them failed; the others have been ended.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=settings.ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
    )
    try:
        with _quiet_elastic(), _limited_threads(settings):
            elastic_launch(config, work)(settings)
    except ChildFailedError as error:
        raise _rank_error(error) from None
    except SignalException as error:
        raise KeyboardInterrupt(error.sigval.name) from None


@contextmanager
def _limited_threads(settings: Settings) -> Iterator[None]:
    """Let new processes share the cores, unless the user has said otherwise.

    What is to be the same at every number of ranks has the same threads.
    """
    given = os.environ.get("OMP_NUM_THREADS")
    threads = 1 if settings.reproducible else threads_of_rank(settings.ranks)
    os.environ["OMP_NUM_THREADS"] = given or str(threads)
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if given:
            os.environ["OMP_NUM_THREADS"] = given


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Leave the traceback of a failed rank to `RankError`; the launcher would log it as well."""
    loggers = [
        logging.getLogger("torch.distributed.elastic.multiprocessing.api"),
        logging.getLogger("torch.multiprocessing.spawn"),
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _rank_error(error: "ChildFailedError") -> RankError:
    """The first failure, with its traceback where the rank could still write one."""
    rank, failure = error.get_first_failure()
    found: Any = failure.message
    if isinstance(found, dict):
        text = found.get("extraInfo", {}).get("py_callstack") or found.get("message")
    elif failure.exitcode < 0:
        text = f"killed by {failure.signal_name()}, without a traceback"
    else:
        text = "it exited without a traceback; its output is above"
    return RankError(f"rank {rank} failed (exit code {failure.exitcode}):\n{text}")
