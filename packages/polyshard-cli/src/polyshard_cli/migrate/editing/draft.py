"""Everything that is to be done to one file, and the findings about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from polyshard_cli.migrate.editing.finding import Finding, Kind
from polyshard_cli.migrate.source.view import FileView, Use
from polyshard_cli.migrate.terms.catalog import know
from polyshard_cli.migrate.terms.term import Term

__all__ = ["Draft", "Edit", "Edited"]

Edited = cst.CSTNode | cst.FlattenSentinel[Any] | cst.RemovalSentinel
Edit = Callable[[cst.CSTNode], Edited]
"""Gets the node as edits inside it left it."""

WHOLE = "polyshard"
"""Among wanted names: the module itself."""


@dataclass
class Draft:
    """Collected by the families, applied once.

    Attributes:
        view: the file as it is.
        edits: what becomes of nodes.
        before: statements to put in front of a line; comments above it stay on top.
        consumed: nodes that are gone or replaced, and every name in them.
        moved: imported names that polyshard has under the same name.
        wanted: names of polyshard to import beside an import statement.
        findings: what the report says of it.
    """

    view: FileView
    edits: dict[cst.CSTNode, Edit] = field(default_factory=dict)
    before: dict[cst.CSTNode, list[cst.BaseStatement]] = field(default_factory=dict)
    consumed: set[cst.CSTNode] = field(default_factory=set)
    moved: set[cst.ImportAlias] = field(default_factory=set)
    wanted: dict[cst.CSTNode, set[str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def say(
        self, node: cst.CSTNode, kind: Kind, term: str, message: str, instead: str = ""
    ) -> None:
        """Add a finding at the line of ``node``."""
        finding = Finding(self.view.line(node), kind, term, message, instead)
        if finding not in self.findings:
            self.findings.append(finding)

    def differs(self, node: cst.CSTNode, term: Term) -> None:
        """Say what is not the same after ``term`` was done, if anything."""
        if term.differs:
            self.say(node, Kind.DIFFERS, term.theirs, term.differs)

    def leave(self, node: cst.CSTNode, term: Term, why: str = "") -> None:
        """Leave ``term`` to the hand, or refuse it, as the table says."""
        kind = Kind.REFUSED if term.verdict.name == "REFUSED" else Kind.HAND
        reason = "nothing in polyshard corresponds" if kind is Kind.REFUSED else "needs a choice"
        self.say(node, kind, term.theirs, why or f"`{term.theirs}`: {reason}.", term.ours)

    def can_want(self, use: Use, *names: str) -> bool:
        """Whether ``names`` of polyshard can be imported where ``use`` is."""
        return bool(self.view.imports_of(use.node)) and all(
            self._is_free(use.node, name) or self._is_ours(use.node, name) for name in names
        )

    def want(self, use: Use, *names: str) -> None:
        """Import ``names`` of polyshard beside what ``use`` is imported by, unless they are."""
        for name in names:
            if self._is_free(use.node, name):
                for statement in self.view.imports_of(use.node):
                    self.wanted.setdefault(statement, set()).add(name)

    def _is_free(self, node: cst.CSTNode, name: str) -> bool:
        return not self.view.assignments(node, name)

    def _is_ours(self, node: cst.CSTNode, name: str) -> bool:
        """Whether ``name`` is bound by imports alone, which say polyshard or will."""
        bound = [
            qualified
            for each in self.view.assignments(node, name)
            for qualified in each.get_qualified_names_for(name)
        ]
        return bool(bound) and all(
            each.source.name == "IMPORT" and _is_that_of_polyshard(each.name, name)
            for each in bound
        )

    def is_consumed(self, node: cst.CSTNode) -> bool:
        """Whether ``node``, or something it is part of, is gone."""
        return any(each in self.consumed for each in self.view.ancestors(node))


def _is_that_of_polyshard(qualified: str, name: str) -> bool:
    if name == WHOLE:
        return qualified == WHOLE
    known = know(qualified)
    moves = known is not None and known.family in {"fsdp2", "clip"}
    return qualified == f"polyshard.{name}" or (moves and qualified.endswith(f".{name}"))
