"""How soon all ranks raise when one does: random ranks, random places, again and again."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from toy_meeting import await_all

from fault_table import TIMEOUT_SECONDS
from faults.model import PLACES, Injection, Purpose, Training
from faults.processes import PATIENT_SECONDS, Ranks
from polyshard.errors import PeerError

STEPS = 3
"""A rank that was done with its step when another failed learns of it in the next."""


@dataclass(frozen=True)
class Raise:
    """One injection, and after how many seconds each rank raised."""

    injection: Injection
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class _Heard:
    at: float
    failed_at: float
    kind: str
    text: str


def measure(ranks: int, count: int, seed: int) -> list[Raise]:
    """Inject ``count`` failures, one after the other, into the same ranks.

    Raises:
        AssertionError: where a rank raised nothing, or blames another than the one that failed.
    """
    heard: list[list[_Heard]] = Ranks(ranks, TIMEOUT_SECONDS).run(
        _endure, count, seed, patience=PATIENT_SECONDS + 5.0 * count
    )
    found = []
    for number, each in enumerate(zip(*heard, strict=True)):
        injection = Injection.draw(seed, number, ranks, PLACES)
        failed = each[injection.rank]
        for rank, one in enumerate(each):
            kind = Purpose if rank == injection.rank else PeerError
            assert one.kind == kind.__name__, (injection, rank, one)
            assert kind is Purpose or f"rank {injection.rank} failed" in one.text, (injection, one)
        found.append(Raise(injection, tuple(one.at - failed.failed_at for one in each)))
    return found


def _endure(rank: int, size: int, count: int, seed: int) -> list[_Heard]:
    moments: list[float] = []
    training = Training(lambda: moments.append(time.monotonic()))
    training.step(0)
    heard = []
    for number in range(count):
        injection = Injection.draw(seed, number, size, PLACES)
        if injection.rank == rank:
            training.prepare(injection)
        await_all("recovered", size)  # ranks fail in the same step
        error = _step_until_error(training)
        at = time.monotonic()
        failed = moments[-1] if injection.rank == rank else 0.0
        heard.append(_Heard(at, failed, type(error).__name__, str(error)))
        training.recover()
        training.step(0)  # all continue
    return heard


def _step_until_error(training: Training) -> Exception | None:
    for index in range(STEPS):
        try:
            training.step(index)
        except (Purpose, PeerError) as error:
            return error
    return None


def summary(found: list[Raise]) -> dict[str, Any]:
    """The distribution of seconds of all ranks that did not fail themselves, and of the slowest."""
    ranks = len(found[0].seconds)
    peers = sorted(
        seconds
        for each in found
        for rank, seconds in enumerate(each.seconds)
        if rank != each.injection.rank
    )
    slowest = sorted(max(each.seconds) for each in found)
    return {
        "ranks": ranks,
        "raises": len(found),
        "within_1_s": sum(seconds <= 1.0 for seconds in slowest),
        "places": dict(sorted(Counter(each.injection.place for each in found).items())),
        "peer_seconds": _distribution(peers),
        "slowest_rank_seconds": _distribution(slowest),
    }


def _distribution(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "p90": round(values[int(0.9 * (len(values) - 1))], 4),
        "p99": round(values[int(0.99 * (len(values) - 1))], 4),
        "max": round(values[-1], 4),
    }
