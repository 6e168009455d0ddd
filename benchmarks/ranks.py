"""Fresh processes for a measurement: ranks that talk over gloo, or one process alone."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from typing import Any

from polyshard.testing.world import World

COLLECTIVE_SECONDS = 120.0
"""A rank may wait that long for its peers; ranks may compute for as long as they like."""


def run_ranks(ranks: int, work: Callable[..., Any], *args: Any) -> Any:
    """Call ``work(*args)`` on ``ranks`` fresh processes; return what rank 0's call returned."""
    with closing(World(ranks, COLLECTIVE_SECONDS, "spawn")) as world:
        return world.run(_on_rank, work, args, timeout=None)[0]


def _on_rank(rank: int, _: int, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    answer = work(*args)
    return None if rank else answer


def run_alone(work: Callable[..., Any], *args: Any) -> Any:
    """Call ``work(*args)`` in a fresh process without a process group; return what it returned."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _use_one_thread) as pool:
        return pool.submit(work, *args).result()


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)
