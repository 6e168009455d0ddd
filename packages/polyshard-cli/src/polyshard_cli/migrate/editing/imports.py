"""Imports at the end: names that moved, names that are not used any more, names that are new."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from polyshard_cli.migrate.editing.draft import WHOLE, Draft, Edited
from polyshard_cli.migrate.source.view import ImportStatement, dotted, walk
from polyshard_cli.migrate.terms.catalog import know, leads_to_known

__all__ = ["edit_imports"]

_OF_POLICIES = {"functools", "functools.partial"}


def edit_imports(draft: Draft) -> None:
    """Turn what ``draft`` says about imports into edits of their statements."""
    _want_once(draft)
    for node in walk(draft.view.module):
        if isinstance(node, cst.ImportFrom):
            _edit_from(draft, node)
        elif isinstance(node, cst.Import):
            _edit_plain(draft, node)


def _want_once(draft: Draft) -> None:
    """Of statements of one block, the first imports what several want."""
    have: set[tuple[cst.CSTNode | None, str]] = set()
    for statement in sorted(draft.wanted, key=draft.view.line):
        line = draft.view.parent(statement)
        block = draft.view.parent(line) if line is not None else None
        new = {name for name in draft.wanted[statement] if (block, name) not in have}
        have |= {(block, name) for name in new}
        draft.wanted[statement] = new


def _is_gone(draft: Draft, alias: cst.ImportAlias, statement: ImportStatement) -> bool:
    """Whether all uses of ``alias`` are, and there were some."""
    if not _may_go(alias, statement):
        return False
    references = draft.view.references(alias, statement)
    return bool(references) and all(map(draft.is_consumed, references))


def _may_go(alias: cst.ImportAlias, statement: ImportStatement) -> bool:
    """Names of other engines, and of what policies are made of; no package on the way to them."""
    name = alias.evaluated_name
    if isinstance(statement, cst.ImportFrom):
        name = f"{dotted(statement.module) if statement.module else ''}.{name}"
    elif alias.asname is None and "." in name:
        return False
    return know(name) is not None or leads_to_known(name) or name in _OF_POLICIES


def _edit_from(draft: Draft, node: cst.ImportFrom) -> None:
    if isinstance(node.names, cst.ImportStar):
        return
    moved = [alias for alias in node.names if alias in draft.moved]
    gone = [
        alias for alias in node.names if alias not in draft.moved and _is_gone(draft, alias, node)
    ]
    wanted = sorted(draft.wanted.get(node, ()))
    if not (moved or gone or wanted):
        return
    kept = [alias for alias in node.names if alias not in {*moved, *gone}]
    new = [cst.ImportAlias(cst.Name(name)) for name in wanted if name != WHOLE]
    made: list[cst.BaseSmallStatement] = []
    if kept:
        made.append(_with_names(node, kept))
    if moved or new:
        made.append(_with_names(node, moved, new).with_changes(module=cst.Name(WHOLE)))
    draft.edits[node] = lambda _: _several([*made, *_whole(wanted)])


def _edit_plain(draft: Draft, node: cst.Import) -> None:
    gone = [alias for alias in node.names if _is_gone(draft, alias, node)]
    wanted = sorted(draft.wanted.get(node, ()))
    if not (gone or wanted):
        return
    kept = [alias for alias in node.names if alias not in gone]
    made: list[cst.BaseSmallStatement] = []
    if kept:
        kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        made.append(node.with_changes(names=kept))
    new = [cst.ImportAlias(cst.Name(name)) for name in wanted if name != WHOLE]
    if new:
        made.append(cst.ImportFrom(cst.Name(WHOLE), new))
    draft.edits[node] = lambda _: _several([*made, *_whole(wanted)])


def _whole(wanted: Sequence[str]) -> list[cst.BaseSmallStatement]:
    return [cst.Import([cst.ImportAlias(cst.Name(WHOLE))])] if WHOLE in wanted else []


def _with_names(
    node: cst.ImportFrom, old: list[cst.ImportAlias], new: Sequence[cst.ImportAlias] = ()
) -> cst.ImportFrom:
    """``node`` with some of its names, comments and parentheses kept, and new ones behind."""
    assert not isinstance(node.names, cst.ImportStar)
    if len(old) == len(node.names) and not new:
        return node
    if not old:  # nothing of the old layout to keep
        return cst.ImportFrom(node.module, list(new))
    last = node.names[-1].comma
    names = [*old, *new]
    for at in range(len(old), len(names)):
        before = names[at - 1]
        if isinstance(before.comma, cst.MaybeSentinel):
            names[at - 1] = before.with_changes(comma=cst.Comma(whitespace_after=_space(node)))
    names[-1] = names[-1].with_changes(comma=_last(names[-1], last))
    if isinstance(last, cst.MaybeSentinel) and old[-1] is not node.names[-1]:
        return node.with_changes(names=names, rpar=_end(node.rpar, old[-1].comma))
    return node.with_changes(names=names)


def _end(
    rpar: cst.RightParen | None, comma: cst.Comma | cst.MaybeSentinel
) -> cst.RightParen | None:
    """The parenthesis behind what is now the last name, whose comment stood behind its comma."""
    if rpar is None or isinstance(comma, cst.MaybeSentinel):
        return rpar
    own, end = comma.whitespace_after, rpar.whitespace_before
    if isinstance(own, cst.ParenthesizedWhitespace) and isinstance(
        end, cst.ParenthesizedWhitespace
    ):
        return rpar.with_changes(whitespace_before=end.with_changes(first_line=own.first_line))
    return rpar


def _space(node: cst.ImportFrom) -> cst.BaseParenthesizableWhitespace:
    """What stands between two names of ``node``."""
    assert not isinstance(node.names, cst.ImportStar)
    first = node.names[0].comma
    several = len(node.names) > 1 and isinstance(first, cst.Comma)
    return first.whitespace_after if several else cst.SimpleWhitespace(" ")  # type: ignore[union-attr]


def _last(
    alias: cst.ImportAlias, comma: cst.Comma | cst.MaybeSentinel
) -> cst.Comma | cst.MaybeSentinel:
    """The comma of what is now the last name: that of the last one before, with its own comment."""
    if isinstance(comma, cst.MaybeSentinel) or isinstance(alias.comma, cst.MaybeSentinel):
        return comma
    own, end = alias.comma.whitespace_after, comma.whitespace_after
    if isinstance(own, cst.ParenthesizedWhitespace) and isinstance(
        end, cst.ParenthesizedWhitespace
    ):
        end = end.with_changes(first_line=own.first_line)
    return comma.with_changes(whitespace_after=end)


def _several(made: Sequence[cst.BaseSmallStatement]) -> Edited:
    if not made:
        return cst.RemoveFromParent()
    return cst.FlattenSentinel(made)
