"""What `polyshard plan` says of a run: its own model and settings, planned rank by rank."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyshard_demo.model import LanguageModel, shape_of
from polyshard_demo.settings import Settings

if TYPE_CHECKING:
    from polyshard_cli import plan
    from polyshard_cli.plan.report.outcome import RankFacts

__all__ = ["plan_settings", "predicted", "unplanned"]

MOST = 8
"""Ranks that a plan is made for, one by one, the first ones; each takes about a second."""
TP_PLAN = "polyshard_tensor_parallel:demo_plan"


def unplanned(settings: Settings) -> str:
    """Why a run with these settings cannot be planned; empty if it can."""
    if settings.engine != "polyshard":
        return f"a plan is of polyshard's own engine, and this run's was {settings.engine}"
    if settings.accumulate > 1:
        return "a plan is of one forward and backward a step, and gradients were accumulated"
    if settings.reproducible:
        return "a plan knows nothing of sums that are made in slots (--reproducible)"
    return ""


def predicted(
    settings: Settings, *, is_cpu: bool
) -> Mapping[int, "tuple[plan.Document, RankFacts]"]:
    """Plans by rank, with what is compared of them. This process must have no process group.

    Args:
        settings: of the run, which :func:`unplanned` says nothing of.
        is_cpu: whether ranks computed on the CPU, where the host's memory is the device's.

    Raises:
        PlanError: what cannot be planned, with the reason.
    """
    from polyshard_cli.plan import draft
    from polyshard_cli.plan.report.outcome import predicted_facts
    from polyshard_cli.plan.request.model import Loaded

    asked, shape = plan_settings(settings, is_cpu=is_cpu), shape_of(settings)
    loaded = Loaded(asked.model, lambda: LanguageModel(shape), _tokens, settings.sequence, TP_PLAN)
    found = {}
    for rank in range(min(settings.ranks, MOST)):
        document = draft(replace(asked, rank=rank), loaded)
        found[rank] = document, predicted_facts(document, host_counts=is_cpu)
    return found


def plan_settings(settings: Settings, *, is_cpu: bool) -> "plan.Settings":
    """What a plan is asked for."""
    from polyshard_cli import plan

    *replicas, shards = settings.data_mesh
    axes = [f"replicate={size}" for size in replicas] + [f"dp={shards}"]
    axes += [f"tp={settings.tp}"] if settings.tp > 1 else []
    offload = [part for part in settings.offload.split(",") if not part.strip().startswith("path=")]
    machine: dict[str, Any] = {"machine": settings.machine} if settings.machine else {}
    return plan.Settings(
        model=f"demo:{settings.preset}",
        mesh=plan.parse_mesh(",".join(axes)),
        batch=settings.batch,
        sequence=settings.sequence,
        plugins=settings.plugins,
        quantize=settings.quantize,
        offload=",".join(offload),
        bf16=settings.bf16,
        backend="gloo" if is_cpu else "nccl",
        **machine,
    )


def _tokens(batch: int, sequence: int) -> Tensor:
    return torch.zeros(batch, sequence, dtype=torch.int64, device="meta")
