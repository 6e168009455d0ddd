"""Verbs that other distributions add to the command, through the ``polyshard.commands`` group."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint

import typer

ENTRY_POINTS = "polyshard.commands"

Verb = Callable[..., object] | typer.Typer


def add_verbs(commands: typer.Typer) -> None:
    """Add every installed verb: a function with typer's annotations, or a ``typer.Typer``.

    One that cannot be imported becomes a verb that says so, so that the others still work.
    """
    for entry_point in sorted(
        importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda e: e.name
    ):
        verb = _load(entry_point)
        if isinstance(verb, typer.Typer):
            commands.add_typer(verb, name=entry_point.name)
        else:
            commands.command(entry_point.name)(verb)


def _load(entry_point: EntryPoint) -> Verb:
    try:
        verb: object = entry_point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the module of somebody else may raise anything, and leave
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
