"""What a sharded training step will need, before it runs: memory, traffic and time."""

from polyshard_cli.plan.drafting import describe, draft
from polyshard_cli.plan.dry_run.units import units_of
from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.report.document import Document
from polyshard_cli.plan.request.mesh import parse_mesh
from polyshard_cli.plan.request.settings import Settings
from polyshard_cli.plan.tuning.search import Open
from polyshard_cli.plan.tuning.tune import Tuning, tune

__all__ = [
    "Document",
    "Open",
    "PlanError",
    "Settings",
    "Tuning",
    "describe",
    "draft",
    "parse_mesh",
    "tune",
    "units_of",
]
