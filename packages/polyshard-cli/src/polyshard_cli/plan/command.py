"""``polyshard plan``: options to settings, a document to a table or JSON, errors to one message."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import torch
import typer

from polyshard_cli.output import console_for_tables, told_in_one_message
from polyshard_cli.plan.drafting import draft
from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.estimate.machines import save_machine
from polyshard_cli.plan.estimate.measuring import measure
from polyshard_cli.plan.page.console import WIDTH, show
from polyshard_cli.plan.page.html import check_page, write_page
from polyshard_cli.plan.report.document import Document
from polyshard_cli.plan.report.sections import lead_of, plan_page, plan_sections
from polyshard_cli.plan.request import options
from polyshard_cli.plan.request.mesh import parse_mesh
from polyshard_cli.plan.request.settings import Settings
from polyshard_cli.plan.request.sizes import parse_bytes
from polyshard_cli.plan.tuning import sections as tuning_report
from polyshard_cli.plan.tuning.document import Tuning
from polyshard_cli.plan.tuning.space import Open
from polyshard_cli.plan.tuning.tune import tune as tuned

MOST_ON_CPU = 8
"""Ranks that share a CPU, however few cores it has: more are taken to be on other hosts."""


def plan(
    model: options.Model = "demo",
    *,
    mesh: options.Mesh = "dp=8",
    batch: options.Batch = Settings.batch,
    accumulate: options.Accumulate = Settings.accumulate,
    sequence: options.Sequence = Settings.sequence,
    fields: options.Fields = None,
    units: options.Units = None,
    inputs: options.Inputs = Settings.inputs,
    plugins: options.Plugins = "",
    quantize: options.Quantize = Settings.quantize,
    offload: options.Offload = Settings.offload,
    tp_plan: options.TpPlan = Settings.tp_plan,
    bf16: options.Bf16 = Settings.bf16,
    reshard: options.Reshard = "auto",
    placement: options.Placement = Settings.placement,
    optimizer: options.Optimizer = Settings.optimizer,
    rank: options.Rank = Settings.rank,
    machine: options.Machine = Settings.machine,
    backend: options.BackendOption = Settings.backend,
    measure_to: options.Measure = None,
    parameters: options.Parameters = False,
    as_json: options.Json = False,
    html: options.Html = None,
    tune: options.Tune = False,
    memory_budget: options.MemoryBudget = "",
    keep: options.Keep = None,
    allow_lossy: options.AllowLossy = False,
) -> None:
    """Say what a training step will need, without running it: memory, traffic, time.

    No accelerator and no other rank is needed; nothing is computed.
    """
    with told_in_one_message(PlanError):
        if html is not None:
            check_page(html)
        if measure_to is not None:
            save_machine(measure(_at_once(parse_mesh(mesh).ranks)), measure_to)
            machine = str(measure_to)
        settings = Settings(
            model=model,
            mesh=parse_mesh(mesh),
            batch=batch,
            accumulate=accumulate,
            sequence=sequence,
            overrides=_overrides(fields or ()),
            units=tuple(units or ()),
            inputs=inputs,
            plugins=tuple(name.strip() for name in plugins.split(",") if name.strip()),
            quantize=quantize,
            offload=offload,
            tp_plan=tp_plan,
            bf16=bf16,
            reshard=_reshard(reshard),
            placement=placement,
            optimizer=optimizer,
            rank=rank,
            machine=machine,
            backend=backend,
        )
        search = _search(tune, memory_budget, keep or (), allow_lossy=allow_lossy)
        found = draft(settings) if search is None else tuned(settings, *search)
        if html is not None:
            write_page(html, _page(found, settings))
    if as_json:
        typer.echo(found.to_json())
        return
    if isinstance(found, Tuning):
        front = tuning_report.tuning_section(found)
        show(tuning_report.lead_of(found), [front], console_for_tables(WIDTH))
        typer.echo(found.python)  # whole lines, to be pasted
    else:
        sections = plan_sections(found, parameters=parameters)
        show(lead_of(found), sections, console_for_tables(WIDTH))
    if html is not None:
        typer.echo(f"written: {html}, a page for any browser")


def _page(found: Document | Tuning, settings: Settings) -> str:
    if isinstance(found, Tuning):
        return tuning_report.tuning_page(found, settings)
    return plan_page(found)


def _search(
    tune: bool, memory_budget: str, keep: Sequence[str], *, allow_lossy: bool
) -> tuple[Open, int] | None:
    """What is left open, and the bytes that a device may hold; ``None`` without ``--tune``."""
    budget = parse_bytes(memory_budget, "--memory-budget") if memory_budget else 0
    if tune:
        return Open(keep=frozenset(keep), allow_lossy=allow_lossy), budget
    given = {"--memory-budget": budget, "--keep": keep, "--allow-lossy": allow_lossy}
    for option in (name for name, value in given.items() if value):
        raise PlanError(f"{option} is for a search; add --tune")
    return None


def _at_once(ranks: int) -> int:
    """How many of so many ranks this machine is taken to run: one a device, or some a core."""
    most = torch.accelerator.device_count() or max(os.cpu_count() or 1, MOST_ON_CPU)
    return max(2, min(ranks, most))


def _overrides(given: Sequence[str]) -> dict[str, object]:
    """``field=value``, where the value is JSON or a plain word."""
    found: dict[str, object] = {}
    for text in given:
        field, equals, value = text.partition("=")
        if not equals or not field:
            raise PlanError(f"--set {text}: write field=value, as num_hidden_layers=4")
        try:
            found[field] = json.loads(value)
        except ValueError:
            found[field] = value
    return found


def _reshard(text: str) -> bool | int | None:
    words: dict[str, bool | None] = {"auto": None, "yes": True, "no": False}
    if text in words:
        return words[text]
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise PlanError(f"--reshard {text}: write auto, yes, no, or a number of ranks such as 8")
