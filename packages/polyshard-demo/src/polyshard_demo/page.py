"""The page in the end: ``report.html``, what happened beside what `polyshard plan` predicts.

It is made from ``report.json``, and from plans of the run's own model and settings, rank by rank.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyshard.files import replace_file
from polyshard_cli import plan
from polyshard_cli.plan.report.outcome import Outcome, RankFacts, predicted_facts, run_page
from polyshard_cli.plan.request.model import load_model
from polyshard_demo.model import LanguageModel, shape_of
from polyshard_demo.settings import Settings

__all__ = ["plan_settings", "predicted", "write_page"]

MOST = 8
"""Ranks that a plan is made for, one by one, the first ones; each takes about a second."""

ON_CPU = (
    "Measured memory is the process's peak, less its memory before the first step without its "
    "part of the model. It includes allocations of libraries in the meantime."
)
ON_DEVICE = "Measured memory is the peak of torch's allocator on the device."
NO_MACHINE = (
    "Time is not predicted: no machine was named. polyshard plan --measure FILE.json measures this "
    "one; polyshard train --machine FILE.json then predicts for it."
)


def write_page(settings: Settings) -> str:
    """Make the page of the run in ``settings.out``; what to say of it.

    This process must have no process group. A run that has ended well is not failed by its page:
    it says in a sentence what cannot be predicted, and any other failure is printed.
    """
    path = settings.out / "report.html"
    try:
        found = json.loads((settings.out / "report.json").read_text("utf-8"))
        replace_file(path, _page(settings, found).encode())
    except Exception as error:  # whatever it is, the run's results are written
        return f"without report.html: {type(error).__name__}: {error}"
    return f"the run beside its prediction: {path}"


def predicted(settings: Settings, *, is_cpu: bool) -> Mapping[int, tuple[plan.Document, RankFacts]]:
    """Plans by rank, with what is compared of them. This process must have no process group.

    Args:
        settings: of the run.
        is_cpu: whether ranks computed on the CPU, where the host's memory is the device's.

    Raises:
        PlanError: what cannot be planned, with the reason.
    """
    if settings.engine != "polyshard":
        raise plan.PlanError(f"a plan is of polyshard's engine, this run's was {settings.engine}")
    if settings.reproducible:
        raise plan.PlanError("a plan knows nothing of sums that are made in slots (--reproducible)")
    asked, shape = plan_settings(settings, is_cpu=is_cpu), shape_of(settings)
    loaded = replace(load_model(asked), build=lambda: LanguageModel(shape))
    found = {}
    for rank in range(min(settings.ranks, MOST)):
        document = plan.draft(replace(asked, rank=rank), loaded)
        found[rank] = document, predicted_facts(document, host_counts=is_cpu)
    return found


def plan_settings(settings: Settings, *, is_cpu: bool) -> plan.Settings:
    """What a plan is asked for."""
    *replicas, shards = settings.data_mesh
    axes = [f"replicate={size}" for size in replicas] + [f"dp={shards}"]
    axes += [f"tp={settings.tp}"] if settings.tp > 1 else []
    return plan.Settings(
        model=f"demo:{settings.preset}",
        mesh=plan.parse_mesh(",".join(axes)),
        batch=settings.batch,
        accumulate=settings.accumulate,
        sequence=settings.sequence,
        plugins=settings.plugin_names,
        quantize=settings.quantize,
        offload=settings.offload,
        bf16=settings.bf16,
        backend="gloo" if is_cpu else "nccl",
        machine=settings.machine or plan.Settings.machine,
    )


def _page(settings: Settings, found: Mapping[str, Any]) -> str:
    is_cpu = found["ranks"][0]["device_bytes"] is None
    notes = [ON_CPU if is_cpu else ON_DEVICE]
    plans: Mapping[int, Any] = {}
    try:
        plans = predicted(settings, is_cpu=is_cpu)
        notes += [] if settings.machine else [NO_MACHINE]
    except Exception as error:  # what happened is worth a page all the same
        notes.append(f"Nothing is predicted ({type(error).__name__}): {error}.")
    held = (
        rank["resident_bytes"] - rank["before_bytes"] if is_cpu else rank["device_bytes"]
        for rank in found["ranks"]
    )
    sent = (rank["step_sent_bytes"] for rank in found["ranks"])
    steps = found["steps"]
    outcome = Outcome(
        tuple(map(RankFacts, held, sent)),
        tuple(step["seconds"] for step in steps),
        tuple((step["step"], step["loss"]) for step in steps),
        tuple((one["step"], one["loss"]) for one in found["evaluations"]),
        tuple(notes),
    )
    lead = (
        f"{found['parameters']:,} parameters, engine {settings.engine}, {len(steps)} steps of "
        f"{settings.batch} x {settings.sequence} bytes on {found['text']['name']}."
    )
    title = f"Run of {settings.preset}, {settings.ranks} ranks"
    return run_page(title, lead, outcome, plans, is_timed=bool(settings.machine))
