"""What a sharded training step will need, before it runs: memory, traffic and time."""

from polyshard_plan.__about__ import __version__
from polyshard_plan.drafting import draft
from polyshard_plan.errors import PlanError
from polyshard_plan.living import describe
from polyshard_plan.report.document import Document
from polyshard_plan.request.mesh import parse_mesh
from polyshard_plan.request.settings import Settings
from polyshard_plan.tuning.document import Tuning
from polyshard_plan.tuning.space import Open
from polyshard_plan.tuning.tune import tune

__all__ = [
    "Document",
    "Open",
    "PlanError",
    "Settings",
    "Tuning",
    "__version__",
    "describe",
    "draft",
    "parse_mesh",
    "tune",
]
