"""The page of a plan: ``polyshard plan --html``."""

from __future__ import annotations

from collections.abc import Sequence

from polyshard_cli.plan.page.blocks import Section
from polyshard_cli.plan.page.rendering import render
from polyshard_cli.plan.page.sections.assumptions import assumptions_section
from polyshard_cli.plan.page.sections.groups import groups_section
from polyshard_cli.plan.page.sections.memory import memory_section
from polyshard_cli.plan.page.sections.notices import notices_section
from polyshard_cli.plan.page.sections.timeline import timeline_section
from polyshard_cli.plan.page.sections.traffic import traffic_section
from polyshard_cli.plan.report.document import Document

__all__ = ["plan_page", "plan_sections"]


def plan_page(document: Document, more: Sequence[Section] = ()) -> str:
    """``document`` as one page of HTML.

    Args:
        document: the plan.
        more: sections that come first, such as the front of a search.

    Raises:
        PlanError: where the extra ``html`` is not installed.
    """
    model, mesh = document.model, document.mesh
    axes = " x ".join(f"{axis.name}={axis.size}" for axis in mesh.axes)
    lead = (
        f"{model.parameters:,} parameters in {model.units} units, on {mesh.ranks:,} ranks "
        f"({axes}); a step of {model.step} a rank, "
        f"{model.optimizer}. Bytes are those of rank {model.rank}."
    )
    return render(f"Plan of {model.name}", lead, (*more, *plan_sections(document)))


def plan_sections(document: Document) -> tuple[Section, ...]:
    """What a plan says, section by section."""
    return (
        memory_section(document),
        timeline_section(document),
        traffic_section(document),
        groups_section(document),
        notices_section(document),
        assumptions_section(document),
    )
