"""``polyshard plan``: options to settings, a document to a table or JSON, errors to one message."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch
import typer

from polyshard_cli.output import console_for_tables, told_in_one_message
from polyshard_cli.plan.drafting import draft
from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.estimate.machines import check_target, save_machine
from polyshard_cli.plan.estimate.measuring import measure
from polyshard_cli.plan.page.blocks import WIDTH, show
from polyshard_cli.plan.page.html import check_page, write_page
from polyshard_cli.plan.report.document import Document
from polyshard_cli.plan.report.sections import lead_of, plan_page, plan_sections
from polyshard_cli.plan.request.settings import (
    LIST,
    OUTPUT,
    SEARCH,
    Settings,
    Written,
    parse_bytes,
    said,
)
from polyshard_cli.plan.tuning import sections as tuning_report
from polyshard_cli.plan.tuning.search import Open
from polyshard_cli.plan.tuning.tune import tune as tuned

MOST_ON_CPU = 8
"""Ranks that share a CPU, however few cores it has: more are taken to be on other hosts."""

MEASURE = "Measure this machine for some seconds, write it to FILE.json, and plan for it."
TUNE = (
    "Search for the fastest setting that fits: meshes of as many ranks, units, resharding, tiers. "
    "Settings of other options stay."
)
KEEP = "Settings that --tune keeps: mesh, replicate, tp, units, reshard, quantize, offload. Repeat."


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with every setting as an option before its own, and mistakes as one message."""
    types, parameters = get_type_hints(Settings), list[Parameter]()
    readers: dict[str, Callable[[Any], Any]] = {}
    for one in fields(Settings):
        written = one.metadata.get("as") or Written(
            types[one.name], one.default, lambda value: value
        )
        readers[one.name] = written.read
        parameters.append(
            Parameter(
                one.name,
                Parameter.KEYWORD_ONLY,
                default=written.default,
                annotation=Annotated[written.type, one.metadata["option"]],
            )
        )
    own = list(signature(command, eval_str=True).parameters.values())[1:]

    def verb(**given: Any) -> None:
        with told_in_one_message(PlanError):
            chosen = {name: read(given.pop(name)) for name, read in readers.items()}
            command(Settings(**chosen), **given)

    verb.__doc__ = command.__doc__
    verb.__signature__ = Signature([*parameters, *own])  # type: ignore[attr-defined]
    return verb


@_with_settings
def plan(
    settings: Settings,
    *,
    measure_to: Annotated[Path | None, said(OUTPUT, MEASURE, "--measure")] = None,
    parameters: Annotated[
        bool, said(OUTPUT, "Every parameter, by dim and axis.", "--parameters")
    ] = False,
    as_json: Annotated[bool, said(OUTPUT, "The plan as JSON.", "--json")] = False,
    html: Annotated[
        Path | None,
        said(OUTPUT, "Write the plan to FILE, one page that needs no network, too.", "--html"),
    ] = None,
    tune: Annotated[bool, said(SEARCH, TUNE, "--tune")] = False,
    memory_budget: Annotated[
        str, said(SEARCH, "Memory of a device: 70GiB. Default: the machine's.")
    ] = "",
    keep: Annotated[LIST, said(SEARCH, KEEP)] = None,
    allow_lossy: Annotated[
        bool,
        said(
            SEARCH, "Let --tune try codecs, which change the values that are sent.", "--allow-lossy"
        ),
    ] = False,
) -> None:
    """Say what a training step will need, without running it: memory, traffic, time.

    No accelerator and no other rank is needed; nothing is computed.
    """
    if html is not None:
        check_page(html)
    if measure_to is not None:
        check_target(measure_to)
        save_machine(measure(_at_once(settings.mesh.ranks)), measure_to)
        settings = replace(settings, machine=str(measure_to))
    search = _search(tune, memory_budget, keep or (), allow_lossy=allow_lossy)
    found = draft(settings) if search is None else tuned(settings, *search)
    if html is not None:
        if isinstance(found, Document):
            write_page(html, plan_page(found))
        else:
            write_page(html, tuning_report.tuning_page(found, settings))
    if as_json:
        typer.echo(found.to_json())
        return
    console = console_for_tables(WIDTH)
    if isinstance(found, Document):
        show(lead_of(found), plan_sections(found, parameters=parameters), console)
    else:
        show(tuning_report.lead_of(found), [tuning_report.tuning_section(found)], console)
        typer.echo(found.python)  # whole lines, to be pasted
    if html is not None:
        typer.echo(f"written: {html}, a page for any browser")


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
