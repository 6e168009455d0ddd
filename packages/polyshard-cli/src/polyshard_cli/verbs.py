"""Verbs of the command: its own, and those of other distributions (``polyshard.commands``).

A verb is imported when it runs, after the extras that it needs were looked for. ``--help`` lists
verbs by what their distributions say of themselves, and so imports neither these nor torch.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typing_extensions import override

from polyshard_cli.needs import missing
from polyshard_cli.output import fail

ENTRY_POINTS = "polyshard.commands"

OWN = {
    "compare": (
        "polyshard_cli.compare.command:compare",
        "One job under several engines: time, memory, bytes, losses",
    ),
    "doctor": (
        "polyshard_cli.doctor:doctor",
        "Check this machine for training",
    ),
    "migrate": (
        "polyshard_cli.migrate.command:migrate",
        "Rewrite scripts that use FSDP2, FSDP1, DDP or DeepSpeed",
    ),
    "plan": (
        "polyshard_cli.plan.command:plan",
        "Memory, traffic and time of a training step, before it runs",
    ),
    "plugins": ("polyshard_cli.plugins:app", "Installed plugins, and a template for new ones"),
    "trace": ("polyshard_cli.trace.command:app", "Timelines of ranks, after a run"),
}
"""Verb by name: where it is, and what it does."""

Verb = Callable[..., object] | typer.Typer


class Verbs(TyperGroup):
    """Commands that are found by name, and imported when they run.

    Contexts and commands are click's, of which some versions of typer bring a copy.
    """

    @override
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(_found())

    @override
    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        """What ``--help`` shows; :meth:`resolve_command` has what runs."""
        point = _found().get(cmd_name)
        return None if point is None else TyperCommand(cmd_name, help=_summary(point))

    @override
    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, shown, rest = super().resolve_command(ctx, args)
        if name is None or shown is None:
            return name, shown, rest
        if need := missing(name, rest):
            fail(need)
        return name, _command(name, _load(_found()[name])), rest


def _found() -> dict[str, EntryPoint]:
    own = [EntryPoint(name, value, ENTRY_POINTS) for name, (value, _) in OWN.items()]
    others = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return {point.name: point for point in (*others, *own)}


def _summary(point: EntryPoint) -> str:
    if point.name in OWN:
        return OWN[point.name][1]
    return point.dist.metadata["Summary"] if point.dist else point.value


def _command(name: str, verb: Verb) -> Any:
    """A function with typer's annotations, or a ``typer.Typer``, as click runs it."""
    if isinstance(verb, typer.Typer):
        return typer.main.get_group(verb)
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name)(verb)
    return typer.main.get_command(single)


def _load(entry_point: EntryPoint) -> Verb:
    """One that cannot be imported becomes a verb that says so."""
    try:
        verb: object = entry_point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the module of another distribution may raise anything
        return _broken(entry_point, f"{type(error).__name__}: {error}")
    if isinstance(verb, typer.Typer) or callable(verb):
        return verb
    return _broken(entry_point, f"it is a {type(verb).__name__}, not a function or typer.Typer")


def _broken(entry_point: EntryPoint, reason: str) -> Verb:
    owner = entry_point.dist.name if entry_point.dist else "an unknown distribution"

    def verb() -> None:
        sys.exit(f"polyshard {entry_point.name}: {entry_point.value} of {owner} failed: {reason}")

    verb.__doc__ = f"Cannot be loaded: {reason}"
    return verb
