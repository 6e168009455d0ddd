"""From settings that leave things open to the best of them."""

from __future__ import annotations

import torch

from polyshard.__about__ import __version__
from polyshard.planning import readable
from polyshard_cli.plan.drafting import Subject, subject_of
from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.estimate.memory import PARTS
from polyshard_cli.plan.request.settings import Settings
from polyshard_cli.plan.tuning.document import (
    SCHEMA,
    RunnerUp,
    Tuning,
    differences,
    point_of,
    reason,
    refusals_of,
)
from polyshard_cli.plan.tuning.script import script_of
from polyshard_cli.plan.tuning.search import Found, Search, Tried, front_of, ranked
from polyshard_cli.plan.tuning.space import Open, space_of, with_batch


def tune(settings: Settings, given: Open, budget_bytes: int = 0) -> Tuning:
    """The fastest setting that fits, and all that no other beats in memory and time.

    Args:
        settings: what is fixed, and a mesh of as many ranks as there are. All settings train on
            the batch that this mesh stands for.
        given: what may be changed.
        budget_bytes: that a device may hold; 0: what the machine's have.

    Raises:
        PlanError: when nothing works, or nothing fits: then it names the smallest.
    """
    settings = with_batch(settings)
    subject = subject_of(settings)
    budget = budget_bytes or subject.machine.memory_bytes
    space = space_of(settings, subject, given)
    found = Search(settings, subject).over(space, budget)
    order = ranked(found.tried, budget)
    if not order:
        raise PlanError(_nothing(found, budget))
    best = order[0]
    return Tuning(
        schema=SCHEMA,
        polyshard=__version__,
        torch=torch.__version__,
        model=subject.loaded.name,
        ranks=settings.mesh.ranks,
        batch=settings.batch,
        sequence=settings.sequence or subject.loaded.sequence,
        machine=subject.machine.name,
        budget_bytes=budget,
        tried=len(found.tried),
        fitting=len(order),
        is_exhaustive=found.is_exhaustive,
        refused=refusals_of(dict(found.refused)),
        skipped=space.skipped,
        units=dict(space.units),
        front=tuple(point_of(t, best.choice, budget) for t in front_of(found.tried)),
        best=point_of(best, best.choice, budget),
        runner_up=_runner_up(order, budget),
        python=_script(settings, subject, best),
    )


def _runner_up(order: tuple[Tried, ...], budget: int) -> RunnerUp | None:
    """The next that differs in what it needs."""
    best = order[0]
    figures = (best.seconds, best.memory_bytes)
    second = next((t for t in order if (t.seconds, t.memory_bytes) != figures), None)
    if second is None:
        return None
    point = point_of(second, best.choice, budget)
    return RunnerUp(point, reason(best, second), differences(best, second))


def _script(settings: Settings, subject: Subject, best: Tried) -> str:
    said = (
        f"# {best.seconds * 1e3:,.2f} ms a step and {readable(best.memory_bytes)} a rank, as "
        f"planned for {subject.machine.name}.\n"
        f"# On each of {settings.mesh.ranks} ranks; model and learning rate are yours.\n"
    )
    return said + script_of(best.choice.applied(settings), subject)


def _nothing(found: Found, budget: int) -> str:
    if not found.tried:
        most = max(found.refused, key=lambda item: item[1])
        total = sum(count for _, count in found.refused)
        return f"--tune: none of {total} settings works; {most[1]} of them: {most[0]}"
    least = min(found.tried, key=lambda t: (t.memory_bytes, t.seconds))
    phase = least.needs.memory.peak
    largest = max(PARTS, key=lambda part: getattr(phase, part))
    return (
        f"--memory-budget {readable(budget)}: none of {len(found.tried)} settings fits. The "
        f"smallest takes {readable(least.memory_bytes)} in {phase.name} (most for {largest}, "
        f"{readable(getattr(phase, largest))}): {least.choice.name}. Give it that, shard over more "
        "ranks, or shorten --batch or --sequence"
    )
