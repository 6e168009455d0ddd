"""A search as one page of HTML: the front, and the plan of what was chosen."""

from __future__ import annotations

from polyshard_cli.plan.drafting import draft
from polyshard_cli.plan.page.plan import plan_page
from polyshard_cli.plan.page.sections import tuning
from polyshard_cli.plan.request.mesh import parse_mesh
from polyshard_cli.plan.request.settings import Settings
from polyshard_cli.plan.tuning.choice import Choice
from polyshard_cli.plan.tuning.document import Point, Tuning
from polyshard_cli.plan.tuning.space import with_batch

__all__ = ["tuning_page"]


def tuning_page(found: Tuning, settings: Settings) -> str:
    """What a search that began with ``settings`` found, and the plan of the best.

    Raises:
        PlanError: where the extra ``html`` is not installed.
    """
    front = [_shown(point) for point in found.front]
    if not any(point.is_chosen for point in front):  # another fits as well, and takes as much
        front.append(_shown(found.best))
    section = tuning.tuning_section(front, limit_bytes=found.budget_bytes)
    return plan_page(draft(_chosen(found.best).applied(with_batch(settings))), (section,))


def _chosen(point: Point) -> Choice:
    mesh = parse_mesh(point.mesh)
    return Choice(mesh, point.units, point.reshard, point.quantize, point.offload)


def _shown(point: Point) -> tuning.Point:
    return tuning.Point(point.name, point.memory_bytes, point.seconds, point.chosen)
