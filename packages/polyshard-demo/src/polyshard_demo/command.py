"""``polyshard train``: every field of the settings that has an option's words as an option."""

import os
from dataclasses import fields
from datetime import datetime
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

from polyshard_cli.output import told_in_one_message
from polyshard_cli.plan.errors import PlanError
from polyshard_demo.errors import DemoError, RankError
from polyshard_demo.launch import launch
from polyshard_demo.settings import EngineName, Settings

__all__ = ["train"]

FAILURE_EXIT = 1
GIVEN: dict[str, tuple[Any, Any]] = {
    "out": (Path | None, None),
    "ranks": (int | None, None),
    "plugins": (str, ""),
}
"""Options of another type than their field, with another default."""


def train(**given: Any) -> None:
    """Train a byte-level language model on real text, sharded over several processes.

    Writes checkpoints, report.json, loss.png and report.html to the run directory.
    """
    told = told_in_one_message(DemoError, PlanError)
    with told, told_in_one_message(RankError, code=FAILURE_EXIT):
        out, resume = given["out"], given["resume"]
        auto = resume == Path("auto")
        if auto and out is None:
            raise DemoError("--resume auto goes on in a directory of its own: give it as --out")
        given["resume"] = resume = out if auto else resume
        given["out"] = out or _default_out(resume)
        given["ranks"] = _ranks(given["ranks"], given["engine"])
        names = (name.strip() for name in given["plugins"].split(","))
        given["plugins"] = tuple(name for name in names if name)
        launch(Settings(**given, auto=auto))


def _signature() -> Signature:
    """What typer reads the options from."""
    parameters = []
    annotated: Any = Annotated
    for field in fields(Settings):
        told: Any = field.type
        if words := getattr(told, "__metadata__", ()):
            kind, default = GIVEN.get(field.name, (told.__origin__, field.default))
            option = annotated[(kind, *words)]
            parameters.append(
                Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=option)
            )
    return Signature(parameters)


train.__signature__ = _signature()  # type: ignore[attr-defined]


def _ranks(given: int | None, engine: EngineName) -> int:
    """The number of ranks: torchrun's, the one asked for, or what the engine is best shown with."""
    if "RANK" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if given is not None:
        return given
    return 1 if engine == "single" else Settings.ranks


def _default_out(resume: Path | None) -> Path:
    """A new run directory, or the one a resume goes on in."""
    if resume is None:
        return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}"
    is_checkpoint = resume.parent.name == "checkpoints"
    return resume.parent.parent if is_checkpoint else resume
