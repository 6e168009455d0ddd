"""The page of a run: what happened beside what was predicted, then the prediction itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from polyshard_cli.plan.page.plan import plan_sections
from polyshard_cli.plan.page.rendering import render
from polyshard_cli.plan.page.sections.outcome import (
    Outcome,
    RankFacts,
    outcome_section,
    steps_section,
)
from polyshard_cli.plan.report.document import Document

__all__ = ["Outcome", "RankFacts", "predicted_facts", "run_page"]

ON_MACHINE = ("time", "notices")
"""Sections that say nothing without a machine."""


def predicted_facts(document: Document, *, host_counts: bool) -> RankFacts:
    """What ``document`` says of its rank, in the terms of a run.

    Args:
        document: the plan of one rank.
        host_counts: whether what rests on the host is in the memory that is compared, as on a CPU.
    """
    host = sum(document.memory.tiers.get("host", {}).values()) if host_counts else 0
    return RankFacts(document.memory.peak.total + host, document.counted_bytes)


def run_page(
    title: str,
    lead: str,
    outcome: Outcome,
    plans: Mapping[int, tuple[Document, RankFacts]],
    *,
    is_timed: bool = False,
) -> str:
    """One page of HTML.

    Args:
        title: of the run.
        lead: the sentences below it.
        outcome: what happened.
        plans: of ranks, with what is compared of them; none where nothing was predicted.
        is_timed: whether the plan is for the machine of the run, so that its time says something.

    Raises:
        PlanError: where the extra ``html`` is not installed.
    """
    document = plans[min(plans)][0] if plans else None
    timing = document.timing if document is not None and is_timed else None
    seconds = None if timing is None else timing.step_seconds
    facts = {rank: found for rank, (_, found) in plans.items()}
    sections = [outcome_section(outcome, facts, seconds), steps_section(outcome, seconds)]
    if document is not None and is_timed:
        sections += plan_sections(document)
    elif document is not None:
        machine = replace(document.machine, name="not named", sources=(), memory_bytes=0)
        known = plan_sections(replace(document, machine=machine, timing=None))
        sections += [section for section in known if section.name not in ON_MACHINE]
    return render(title, lead, sections)
