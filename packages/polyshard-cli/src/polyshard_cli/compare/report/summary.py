"""From what ranks told to a document: medians, ratios, differences."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Callable, Sequence

import torch

from polyshard.__about__ import __version__
from polyshard_cli.compare.ranks.crew import threads_of_rank
from polyshard_cli.compare.report.document import (
    SCHEMA,
    Comparison,
    Environment,
    Error,
    JobFacts,
    Losses,
    Result,
    Timing,
)
from polyshard_cli.compare.report.runs import Run
from polyshard_cli.compare.settings import Settings
from polyshard_cli.compare.training.session import Sample
from polyshard_cli.compare.turns import paired

__all__ = ["summarize"]


def summarize(settings: Settings, runs: Sequence[Run]) -> Comparison:
    """The document of ``runs``, in their order."""
    reference = next((run for run in runs if run.failure is None), None)
    facts = next((run.facts for run in runs if run.facts is not None), None)
    job = None
    if facts is not None:
        job = JobFacts(settings.job, facts.parameters, facts.trainable, facts.units)
    return Comparison(
        schema=SCHEMA,
        settings=settings,
        environment=Environment(
            __version__,
            str(torch.__version__),
            platform.python_version(),
            os.cpu_count() or 1,
            threads_of_rank(settings.ranks),
        ),
        job=job,
        reference=None if reference is None else reference.name,
        results=tuple(_result(settings, run, reference) for run in runs),
    )


def _result(settings: Settings, run: Run, reference: Run | None) -> Result:
    if run.failure is not None or reference is None:
        assert run.failure is not None
        step = None if run.facts is None else len(run.steps)
        failure = run.failure
        return Result(run.name, Error(failure.message, failure.rank, step, failure.details))
    timed = run.steps[settings.warmup :]
    return Result(
        run.name,
        timing=_timing(settings, run, reference),
        memory=tuple(run.memory),
        wire_bytes=_bytes(timed, lambda sample: sample.wire_bytes),
        counted_bytes=_bytes(timed, lambda sample: sample.counted_bytes),
        losses=_losses(run, reference),
        plan=run.plan,
    )


def _timing(settings: Settings, run: Run, reference: Run) -> Timing:
    own, others = (_seconds(settings, one) for one in (run, reference))
    median = statistics.median(own)
    ratio = None if settings.sequential else paired(own, others)
    return Timing(median, own, median / statistics.median(others), ratio)


def _seconds(settings: Settings, run: Run) -> tuple[float, ...]:
    """Of the slowest rank, step by step without the warm-up."""
    return tuple(max(s.seconds for s in step) for step in run.steps[settings.warmup :])


def _bytes(
    steps: Sequence[Sequence[Sample]], of: Callable[[Sample], int | None]
) -> tuple[int, ...] | None:
    """Each rank's median over the steps."""
    found = []
    for samples in zip(*steps, strict=True):
        known = [nbytes for nbytes in map(of, samples) if nbytes is not None]
        if len(known) < len(samples):
            return None
        found.append(statistics.median_low(known))
    return tuple(found)


def _losses(run: Run, reference: Run) -> Losses:
    own, others = _by_step(run), _by_step(reference)
    means, theirs = ([math.fsum(step) / len(step) for step in every] for every in (own, others))
    differences = [_difference(a, b) for a, b in zip(means, theirs, strict=True)]
    same = all(
        len(a) == len(b) and all(map(_equal, a, b)) for a, b in zip(own, others, strict=True)
    )
    return Losses(tuple(means), max(differences), same)


def _by_step(run: Run) -> list[list[float]]:
    """Losses of all batches of a step, in the order of ranks."""
    return [[loss for sample in step for loss in sample.losses] for step in run.steps]


def _equal(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _difference(a: float, b: float) -> float:
    """Infinite where one of them is no number."""
    if _equal(a, b):
        return 0.0
    return abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf
