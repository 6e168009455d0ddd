"""Engines take turns: the same job, step by step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from functools import partial

import torch

from polyshard_cli.compare.engines.plugins import make_stack
from polyshard_cli.compare.engines.spec import parse
from polyshard_cli.compare.errors import CompareError, JobError
from polyshard_cli.compare.job.loading import load
from polyshard_cli.compare.ranks.crew import Crew, EngineError
from polyshard_cli.compare.report.document import Comparison
from polyshard_cli.compare.report.runs import Run
from polyshard_cli.compare.report.summary import summarize
from polyshard_cli.compare.settings import DeviceName, Settings
from polyshard_cli.compare.turns import rotated

__all__ = ["compare"]

Tell = Callable[[str], None]


def compare(settings: Settings, tell: Tell | None = None) -> Comparison:
    """Train the job under every engine, each in ranks of its own.

    The result has the error of an engine that fails; the others continue.

    Args:
        settings: job, engines and sizes to compare.
        tell: called with a line of text whenever a longer part begins.

    Raises:
        CompareError: before any rank starts, for engines that are unknown or not installed.
        JobError: for a job that no engine can train.
    """
    say = tell or _nothing
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CompareError(
            "a comparison starts ranks of its own, and this is one of several processes of a "
            "launcher; start it once, without torchrun, and say how many with --ranks"
        )
    settings = replace(settings, device=_device(settings))
    specs = parse(settings.engines, settings.ranks)
    with redirect_stdout(sys.stderr):  # what modules print when imported is no part of a table
        for spec in specs:
            if spec.kind == "polyshard":
                make_stack(spec)  # so that a mistake is told before any rank starts
        load(settings)
    runs = {spec.name: Run(spec.name) for spec in specs}
    for together in [[spec] for spec in specs] if settings.sequential else [list(specs)]:
        with ExitStack() as stack:
            crews = []
            for spec in together:
                crews.append(Crew(settings, spec))
                stack.callback(crews[-1].close)
            _run(settings, crews, runs, say)
    return summarize(settings, [runs[spec.name] for spec in specs])


def _run(settings: Settings, crews: list[Crew], runs: dict[str, Run], say: Tell) -> None:
    """All steps of some engines, which begin each step in another order."""
    for crew in crews:
        say(f"{crew.spec.name}: building")
        _build(settings, crew, runs)
    for index in range(settings.all_steps):
        say(f"step {index + 1} of {settings.all_steps}")
        for crew in rotated(crews, index):
            _asked(crew, runs[crew.spec.name], partial(_step, index))
    for crew in crews:
        _asked(crew, runs[crew.spec.name], _end)


def _build(settings: Settings, crew: Crew, runs: dict[str, Run]) -> None:
    """Have ranks build the job, which must be the same everywhere."""

    def built(crew: Crew, run: Run) -> None:
        crew.meet()
        facts = crew.answers()
        known = next((one.facts for one in runs.values() if one.facts is not None), facts[0])
        for rank, found in enumerate(facts):
            if found.digest != known.digest:
                names = [a[0] for a, b in zip(found.digest, known.digest, strict=False) if a != b]
                raise JobError(
                    f"JOB {settings.job}: on rank {rank} of {crew.spec.name} "
                    f"{names[0] if names else 'the model'} begins with other values than before; "
                    "build() must draw from torch's, random's or NumPy's own generators, which "
                    "are seeded, and not from time or the rank"
                )
        run.facts = facts[0]

    _asked(crew, runs[crew.spec.name], built)


def _step(index: int, crew: Crew, run: Run) -> None:
    run.steps.append(crew.ask("step", index))


def _end(crew: Crew, run: Run) -> None:
    run.memory = crew.ask("memory")
    run.plan = crew.ask("plan")[0]
    crew.close()


def _asked(crew: Crew, run: Run, work: Callable[[Crew, Run], None]) -> None:
    """Do something with an engine that has not failed; if it does, say so in its run.

    Raises:
        JobError: where it is the job's fault.
    """
    if run.failure is not None:
        return
    try:
        work(crew, run)
    except EngineError as error:
        if error.failure.is_of_job:
            raise JobError(error.failure.message) from None
        run.failure = error.failure


def _device(settings: Settings) -> DeviceName:
    """``cpu`` or ``cuda``.

    Raises:
        CompareError: for fewer devices than ranks.
    """
    count = torch.cuda.device_count()
    if settings.device == "cpu" or (settings.device == "auto" and not count):
        return "cpu"
    if count < settings.ranks:
        raise CompareError(
            f"--ranks {settings.ranks} need a CUDA device each, and torch finds {count}; give "
            f"{f'--ranks {count} or ' if count else ''}--device cpu"
        )
    return "cuda"


def _nothing(_: str) -> None:
    pass
