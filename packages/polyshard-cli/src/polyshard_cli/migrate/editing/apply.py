"""A draft done to its tree."""

from __future__ import annotations

import libcst as cst

from polyshard_cli.migrate.editing.draft import Draft, Edited
from polyshard_cli.migrate.editing.imports import edit_imports

__all__ = ["apply"]


def apply(draft: Draft) -> bytes:
    """The file with everything in ``draft`` done, in its own encoding and line ends."""
    edit_imports(draft)
    changed = draft.view.module.visit(_Applying(draft))
    assert isinstance(changed, cst.Module)
    cst.parse_module(changed.code)  # a result that does not parse is never handed on
    return changed.bytes


class _Applying(cst.CSTTransformer):
    def __init__(self, draft: Draft) -> None:
        super().__init__()
        self._draft = draft

    def on_leave(self, original_node, updated_node):  # type: ignore[no-untyped-def]
        """Edits, then what goes in front; small statements that became several get lines."""
        edit = self._draft.edits.get(original_node)
        result = updated_node if edit is None else edit(updated_node)
        if isinstance(result, cst.SimpleStatementLine):
            result = self._lines(original_node, result)
        return result

    def _lines(self, original: cst.SimpleStatementLine, updated: cst.SimpleStatementLine) -> Edited:
        lines: list[cst.BaseStatement] = [updated]
        if len(original.body) == 1 and len(updated.body) > 1:
            lines = [cst.SimpleStatementLine([small]) for small in updated.body]
            lines[-1] = lines[-1].with_changes(trailing_whitespace=updated.trailing_whitespace)
        lines = [*self._draft.before.get(original, ()), *lines]
        if len(lines) == 1:
            return lines[0]
        rest = [line.with_changes(leading_lines=[]) for line in lines[1:]]
        first = lines[0].with_changes(leading_lines=updated.leading_lines)
        return cst.FlattenSentinel([first, *rest])
