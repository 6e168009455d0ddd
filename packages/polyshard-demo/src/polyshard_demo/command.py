"""``polyshard train``: every field of the settings that has an option's words as an option."""

import os
from dataclasses import fields
from datetime import datetime
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

from polyshard_cli.output import told_in_one_message
from polyshard_cli.plan.errors import PlanError
from polyshard_demo.checkpoint import run_of
from polyshard_demo.errors import DemoError, RankError
from polyshard_demo.launch import launch
from polyshard_demo.settings import AUTO, Settings

__all__ = ["train"]

GIVEN: dict[str, Any] = {"out": Path | None, "ranks": int | None}
"""Options whose default follows from others, with their type."""


def train(**given: Any) -> None:
    """Train a byte-level language model on real text, sharded over several processes.

    Writes checkpoints, report.json, loss.png and report.html to the run directory.
    """
    with told_in_one_message(DemoError, PlanError), told_in_one_message(RankError, code=1):
        resume = given["resume"]
        if given["out"] is None:
            if resume == AUTO:
                raise DemoError("--resume auto goes on in a directory of its own: give it as --out")
            new = Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}"
            given["out"] = new if resume is None else run_of(resume)
        if "RANK" in os.environ:
            given["ranks"] = int(os.environ["WORLD_SIZE"])
        elif given["ranks"] is None:
            given["ranks"] = 1 if given["engine"] == "single" else Settings.ranks
        launch(Settings(**given))


def _signature() -> Signature:
    """What typer reads the options from."""
    parameters = []
    annotated: Any = Annotated
    for field in fields(Settings):
        told: Any = field.type
        if words := getattr(told, "__metadata__", ()):
            late = field.name in GIVEN
            option = annotated[(GIVEN[field.name] if late else told.__origin__, *words)]
            default = None if late else field.default
            parameters.append(
                Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=option)
            )
    return Signature(parameters)


train.__signature__ = _signature()  # type: ignore[attr-defined]
