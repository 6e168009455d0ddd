"""Where ``deepspeed.initialize`` stands, and whether all around it can be followed."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst
from libcst.metadata import BaseAssignment

from polyshard_cli.migrate.editing.draft import Draft
from polyshard_cli.migrate.families.wrapper import is_word
from polyshard_cli.migrate.source.view import FileView, dotted, walk

__all__ = ["Site", "find_site"]

_TAKEN = {"model", "optimizer", "model_parameters", "config", "config_params"}
_STARTS_GROUP = {"init_distributed", "init_process_group"}
_HARMLESS = {"args", "dist_init_required", "distributed_port"}


@dataclass(frozen=True)
class Site:
    """The statement ``engine, returned, _, _ = deepspeed.initialize(model=..., optimizer=...)``.

    Attributes:
        line: it.
        engine, returned: names of what it returns; ``_`` for what is not wanted.
        engine_target, model_argument: the names ``engine`` and ``model`` in the statement.
        model, optimizer: the variables that it is given.
        optimizer_line: where the optimizer is made, in the same block.
    """

    line: cst.SimpleStatementLine
    engine: str
    engine_target: cst.Name
    model_argument: cst.Name
    returned: str
    model: str
    optimizer: str
    optimizer_line: cst.SimpleStatementLine


def find_site(draft: Draft, call: cst.Call, given: dict[str, cst.Arg]) -> Site | str:
    """The statement, or why it cannot be rewritten."""
    view = draft.view
    for name, arg in given.items():
        if name not in _TAKEN | _HARMLESS and not is_word(arg.value, "None"):
            return f"`{name}=` needs a choice."
    line, targets = view.statement(call), _targets(view, call)
    if line is None or len(targets) != 4:
        return "its result is not assigned to four names."
    if any(target.value != "_" for target in targets[2:]):
        return "its loader or scheduler is used."
    model, optimizer = (given.get(name) for name in ("model", "optimizer"))
    if model is None or not isinstance(model.value, cst.Name):
        return "its model is not a variable."
    if optimizer is None or not isinstance(optimizer.value, cst.Name):
        return "its optimizer is not a variable of this file."
    made = _made(view, optimizer.value, line)
    if made is None or view.parent(made) is not view.parent(line):
        return "its optimizer is not made in one statement above, in the same block."
    if why := _mismatch(view, model.value, made, line) or _escape(view, targets[0], line):
        return why
    engine, returned = targets[:2]
    names = returned.value, model.value.value, optimizer.value.value
    return Site(line, engine.value, engine, model.value, *names, made)


def _targets(view: FileView, call: cst.Call) -> list[cst.Name]:
    """The names that a tuple of names gets."""
    assign = view.parent(call)
    if not isinstance(assign, cst.Assign) or len(assign.targets) != 1:
        return []
    target = assign.targets[0].target
    values = [each.value for each in target.elements] if isinstance(target, cst.Tuple) else []
    names = [value for value in values if isinstance(value, cst.Name)]
    return names if len(names) == len(values) else []


def _bindings(view: FileView, name: cst.Name) -> list[tuple[BaseAssignment, cst.CSTNode]]:
    found = view.assignments(name, name.value)
    return [
        (each, node)
        for each in found
        if isinstance(node := getattr(each, "node", None), cst.CSTNode)
    ]


def _made(
    view: FileView, name: cst.Name, besides: cst.SimpleStatementLine
) -> cst.SimpleStatementLine | None:
    """The one line that binds ``name``, ``besides`` apart."""
    lines = {view.statement(node) for _, node in _bindings(view, name)} - {besides}
    line = lines.pop() if len(lines) == 1 else None
    is_assignment = line is not None and isinstance(line.body[0], cst.Assign)
    return line if is_assignment else None


def _mismatch(view: FileView, model: cst.Name, made: cst.CSTNode, line: cst.CSTNode) -> str:
    """Why the optimizer may not be that of the model, if so."""
    if f"{model.value}.parameters()" not in view.code(made):
        return "its optimizer is not made of the parameters of its model."
    lines = [view.line(node) for _, node in _bindings(view, model)]
    if any(view.line(made) <= each < view.line(line) for each in lines):
        return "its model is assigned again between the optimizer and this call."
    # Sharding, which goes before the optimizer, needs the process group.
    calls = (each for each in walk(view.module) if isinstance(each, cst.Call))
    starts = (c for c in calls if dotted(c.func).rpartition(".")[2] in _STARTS_GROUP)
    if any(view.line(made) < view.line(each) < view.line(line) for each in starts):
        return "the process group starts between the optimizer and this call; start it above."
    return ""


def _escape(view: FileView, engine: cst.Name, line: cst.SimpleStatementLine) -> str:
    """Why the engine cannot be followed, if it is passed on or bound twice."""
    inside = set(walk(line))
    for _, node in _bindings(view, engine):
        if node not in inside and view.line(node) > view.line(line):
            return f"`{engine.value}` is bound again later."
    for mention in view.mentions(engine):
        if mention in inside or view.is_before(mention, line):
            continue
        parent = view.parent(mention)
        is_read = isinstance(parent, cst.Attribute) and parent.value is mention
        is_called = isinstance(parent, cst.Call) and parent.func is mention
        if not is_read and not is_called:
            return f"`{engine.value}` is passed on in line {view.line(mention)}."
    return ""
