"""The loop that shards inner modules, in front of the call that shards the whole."""

from __future__ import annotations

import libcst as cst

from polyshard_cli.migrate.editing.draft import Edit
from polyshard_cli.migrate.editing.text import call_text
from polyshard_cli.migrate.families.wrapper import Shape, Wrapping, call_with
from polyshard_cli.migrate.source.view import dotted
from polyshard_cli.migrate.terms import fsdp1

__all__ = ["place", "shard_call"]

_ELEMENTS = ("module", "unit", "each_module", "sharded_unit")
"""What the variable of a loop may be called."""


def place(wrapping: Wrapping) -> list[cst.BaseStatement]:
    """What goes in front of the call's line; where it cannot, ``wrapping.left`` says why."""
    if not (wrapping.classes or wrapping.takes):
        return []
    term = fsdp1.KEYWORDS.find("auto_wrap_policy")
    module, target = wrapping.module, _target(wrapping)
    assert term is not None
    assert module is not None
    element = next((n for n in _ELEMENTS if not wrapping.view.assignments(wrapping.call, n)), "")
    if target is None or not element:
        wrapping.leave(wrapping.call, term, "there is no place for a loop in front of this call.")
        return []
    repeated = wrapping.keywords().get("mesh", "mesh")
    if not repeated.replace(".", "").replace("_", "").isalnum():
        wrapping.leave(wrapping.call, term, "its mesh would be made once for every module.")
        return []
    text = wrapping.view.code(module.value)
    if not target:
        return [cst.parse_statement(_loop(wrapping, text, element))]
    named = cst.parse_statement(f"{target} = {text}")
    return [named, cst.parse_statement(_loop(wrapping, target, element))]


def _target(wrapping: Wrapping) -> str | None:
    """The variable that the module has to get first; empty if it has one; ``None``: no place."""
    line = wrapping.view.statement(wrapping.call)
    holder = wrapping.view.parent(wrapping.call)
    module = wrapping.module
    if line is None or holder is not line.body[0] or module is None:
        return None
    if dotted(module.value):
        return ""
    if isinstance(holder, cst.Assign) and len(holder.targets) == 1:
        return dotted(holder.targets[0].target) or None
    return None


def _loop(wrapping: Wrapping, name: str, element: str) -> str:
    is_one = f"isinstance({element}, {wrapping.classes})"
    condition = is_one if wrapping.classes else f"{wrapping.takes}({element})"
    keywords = [f"{key}={text}" for key, text in wrapping.keywords().items()]
    return (
        f"for {element} in reversed(list({name}.modules())):\n"
        f"    if {element} is not {name} and {condition}:\n"
        f"        {call_text('fully_shard', [element, *keywords], ' ' * 8)}\n"
    )


def shard_call(wrapping: Wrapping) -> Edit:
    """An edit that makes the call one of ``fully_shard``."""
    kept = {
        at: wrapping.kept[arg] for at, arg in enumerate(wrapping.call.args) if arg in wrapping.kept
    }
    # edits inside arguments are done before: what stays keeps its own, changed value
    kept = {at: (name, None) for at, (name, _) in kept.items()}
    target = _target(wrapping) if wrapping.classes or wrapping.takes else ""
    if target:
        kept = {at: (name, target if not name else text) for at, (name, text) in kept.items()}
    return call_with(Shape("fully_shard", kept, wrapping.added))
