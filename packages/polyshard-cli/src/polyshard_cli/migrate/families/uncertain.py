"""What cannot be followed: star imports, modules passed on, names in strings, private names."""

from __future__ import annotations

import re

import libcst as cst

from polyshard_cli.migrate.editing.draft import Draft
from polyshard_cli.migrate.editing.finding import Kind
from polyshard_cli.migrate.families.moving import imported
from polyshard_cli.migrate.source.view import FileView, Use, dotted, walk
from polyshard_cli.migrate.terms.catalog import MODULES, know, leads_to_known

__all__ = ["list_uncertain"]

_PATH = re.compile(r"torch\.distributed\.(fsdp|_composable\.fsdp)(\.\w+)*|torch\.nn\.parallel\.\w+")
_STRAYS = ("torch.distributed.fsdp", "torch.distributed._composable", "deepspeed")


def list_uncertain(draft: Draft) -> None:
    """Everything that is left when all engines have taken theirs."""
    for node in walk(draft.view.module):
        if isinstance(node, cst.ImportFrom):
            _from(draft, node)
        elif isinstance(node, cst.SimpleString):
            _string(draft, node)
    _annotations(draft)
    _uses(draft)


def _from(draft: Draft, node: cst.ImportFrom) -> None:
    if node.relative or node.module is None:
        return
    module = dotted(node.module)
    if isinstance(node.names, cst.ImportStar):
        if module in MODULES or module.startswith("deepspeed."):
            why = "a star import binds names that cannot be known."
            draft.say(node, Kind.HAND, module, why, "import names one by one, and migrate again")
        return
    for alias in node.names:
        name = f"{module}.{alias.evaluated_name}"
        if know(name) is None and not leads_to_known(name) and name.startswith(_STRAYS):
            _stray(draft, node, name)


def _stray(draft: Draft, node: cst.CSTNode, name: str) -> None:
    last = name.rpartition(".")[2]
    private = any(part.startswith("_") for part in name.split(".") if part != "_composable")
    what = "is private to torch" if private else "is in no table"
    instead = "look up its effect in torch, and whether `polyshard` has a public name for it"
    draft.say(node, Kind.HAND, last, f"`{name}` {what}.", instead)


def _string(draft: Draft, node: cst.SimpleString) -> None:
    value = node.evaluated_value
    if isinstance(value, str) and _PATH.fullmatch(value):
        why = f"a name in a string, {value!r}, may be looked up."
        draft.say(node, Kind.HAND, value, why, "write polyshard's name, if so")


def _annotations(draft: Draft) -> None:
    """Names in strings that annotate, of imports that would go."""
    for node, alias, known in imported(draft):
        if known.family not in {"fsdp1", "ddp", "deepspeed"}:
            continue
        for reference in draft.view.references(alias, node):
            if isinstance(reference, cst.SimpleString):
                why = f"`{known.name}` in an annotation that is a string."
                draft.say(reference, Kind.HAND, known.name, why, "write FSDPModule, and import it")


def _uses(draft: Draft) -> None:
    for use in draft.view.uses:
        if draft.is_consumed(use.node):
            continue
        written = draft.view.code(use.node)
        if use.known is None and leads_to_known(use.qualified):
            why = f"`{written}`, a module, is used in a way that cannot be followed."
            instead = "import the names that you need from it, and migrate again"
            draft.say(use.node, Kind.HAND, use.qualified, why, instead)
        elif use.known is None and not _is_imported_by_name(draft.view, use.node):
            _stray(draft, use.node, use.qualified)
        elif use.known is not None and not _is_told(draft, use):
            draft.leave(use.node, use.known.term, f"`{written}` is used here.")


def _is_told(draft: Draft, use: Use) -> bool:
    """Whether its import moved, or its line needs a hand for another reason."""
    line = draft.view.line(use.node)
    listed = any(each.line == line and each.kind.is_left for each in draft.findings)
    return listed or use.known is None or use.known.family in {"fsdp2", "clip"}


def _is_imported_by_name(view: FileView, node: cst.CSTNode) -> bool:
    """Whether its import statement was listed already."""
    return isinstance(node, cst.Name) and any(
        isinstance(each, cst.ImportFrom) for each in view.imports_of(node)
    )
