"""One file with what its names stand for: a tree, lines, scopes and qualified names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import (
    BaseAssignment,
    ImportAssignment,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    Scope,
    ScopeProvider,
)
from libcst.metadata.scope_provider import Assignment

from polyshard_cli.migrate.terms.catalog import Known, know, leads_to_known

__all__ = ["FileView", "ImportStatement", "Use", "dotted"]

ImportStatement = cst.Import | cst.ImportFrom


@dataclass(frozen=True)
class Use:
    """A name of a table where a file uses it, imports apart.

    Attributes:
        node: the whole name, ``fsdp.fully_shard``.
        known: what it is; ``None`` for a module of other engines that is passed on whole, or a
            name in it that no table has.
        qualified: what it stands for.
        is_certain: nothing else is bound to its first name.
    """

    node: cst.Name | cst.Attribute
    known: Known | None
    qualified: str
    is_certain: bool


class FileView:
    """A parsed file; nodes are compared by identity and belong to :attr:`module`."""

    def __init__(self, module: cst.Module) -> None:
        """Copies ``module``, which stays as it is."""
        wrapper = MetadataWrapper(module)
        self.module = wrapper.module
        self._positions = wrapper.resolve(PositionProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._scopes = wrapper.resolve(ScopeProvider)
        self._firsts = set(_first_names(self.module))
        self.uses = tuple(_uses(self, self.module))

    def line(self, node: cst.CSTNode) -> int:
        """Where ``node`` begins, from 1."""
        return self._positions[node].start.line

    def code(self, node: cst.CSTNode) -> str:
        """The text of ``node``."""
        return self.module.code_for_node(node)

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """What ``node`` is part of."""
        return self._parents.get(node)

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """``node``, its parent, and so on."""
        current: cst.CSTNode | None = node
        while current is not None:
            yield current
            current = self.parent(current)

    def statement(self, node: cst.CSTNode) -> cst.SimpleStatementLine | None:
        """The line that ``node`` is on, if that holds one statement and begins a line."""
        for each in self.ancestors(node):
            if isinstance(each, cst.SimpleStatementLine):
                return each if len(each.body) == 1 else None
            if isinstance(each, cst.BaseCompoundStatement):
                return None
        return None

    def is_before(self, node: cst.CSTNode, other: cst.CSTNode) -> bool:
        """Whether ``node`` stands, and so runs, before ``other``: in one function, further up."""
        same = self._function(node) is self._function(other)
        return same and self.line(node) < self.line(other)

    def _function(self, node: cst.CSTNode) -> cst.CSTNode | None:
        functions = (cst.FunctionDef, cst.Lambda)
        return next((each for each in self.ancestors(node) if isinstance(each, functions)), None)

    def names(self, node: cst.CSTNode) -> dict[str, bool]:
        """What ``node`` may stand for, and whether an import says so."""
        scope = self._scopes.get(node)
        names = () if scope is None else scope.get_qualified_names_for(node)
        return {name.name: name.source.name == "IMPORT" for name in names}

    def may_be_foreign(self, node: cst.Name | cst.Attribute) -> bool:
        """Whether the first name of ``node`` is one that an import of torch or DeepSpeed binds.

        Asked first, since what names stand for takes most of the time.
        """
        return dotted(node).partition(".")[0] in self._firsts

    def assignments(self, node: cst.CSTNode, name: str) -> list[BaseAssignment]:
        """Everything that binds ``name`` where ``node`` is."""
        scope = self._scope(node)
        return [] if scope is None else sorted(scope[name], key=self._order)

    def is_same(self, name: str, here: cst.CSTNode, there: cst.CSTNode) -> bool:
        """Whether the same statements bind ``name`` at both places, so that it is one variable."""
        return self.assignments(here, name) == self.assignments(there, name)

    def _order(self, assignment: BaseAssignment) -> int:
        node = getattr(assignment, "node", None)
        return self.line(node) if isinstance(node, cst.CSTNode) and node in self._positions else 0

    def _scope(self, node: cst.CSTNode) -> Scope | None:
        return next((s for n in self.ancestors(node) if (s := self._scopes.get(n))), None)

    def imports_of(self, node: cst.Name | cst.Attribute) -> list[ImportStatement]:
        """The statements that import the first name of ``node``."""
        first = dotted(node).partition(".")[0]
        found: dict[ImportStatement, None] = {}
        for each in self.assignments(node, first):
            if isinstance(each, ImportAssignment) and isinstance(each.node, ImportStatement):
                found[each.node] = None
        return list(found)

    def is_rebound(self, alias: cst.ImportAlias, statement: cst.CSTNode) -> bool:
        """Whether something that is no import binds the name of ``alias`` too."""
        name = alias.evaluated_alias or alias.evaluated_name.partition(".")[0]
        return any(not isinstance(b, ImportAssignment) for b in self.assignments(statement, name))

    def references(self, alias: cst.ImportAlias, statement: cst.CSTNode) -> list[cst.CSTNode]:
        """Where the file uses the name that ``alias`` binds."""
        name = alias.evaluated_alias or alias.evaluated_name
        bound = self.assignments(statement, name)
        return [reference.node for each in bound for reference in each.references]

    def value(self, node: cst.BaseExpression) -> cst.BaseExpression:
        """``node``, or what is assigned to it where it is a name that is bound once, plainly."""
        if not isinstance(node, cst.Name):
            return node
        bound = self.assignments(node, node.value)
        if len(bound) != 1 or not isinstance(bound[0], Assignment):
            return node
        target = self.parent(bound[0].node)
        assign = self.parent(target) if isinstance(target, cst.AssignTarget) else None
        plain = isinstance(assign, cst.Assign) and len(assign.targets) == 1
        return assign.value if plain and isinstance(assign, cst.Assign) else node

    def mentions(self, target: cst.BaseExpression) -> list[cst.BaseExpression]:
        """Where else the variable ``target`` is: a name in its scope, ``self.x`` in its class."""
        if isinstance(target, cst.Name):
            bound = self.assignments(target, target.value)
            nodes = [r.node for each in bound for r in each.references]
            return [node for node in dict.fromkeys(nodes) if isinstance(node, cst.Name)]
        home = next((n for n in self.ancestors(target) if isinstance(n, cst.ClassDef)), None)
        if home is None:
            return []
        wanted = self.code(target)
        same = (n for n in walk(home) if isinstance(n, cst.Attribute) and self.code(n) == wanted)
        return [node for node in same if node is not target]


def dotted(node: cst.BaseExpression) -> str:
    """``a.b.c`` of a chain of names; empty for anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr.value}" if before else ""
    return ""


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """``node`` and everything in it."""
    yield node
    for child in node.children:
        yield from walk(child)


def _uses(view: FileView, node: cst.CSTNode) -> Iterator[Use]:
    if isinstance(node, ImportStatement):
        return
    if isinstance(node, cst.Name | cst.Attribute) and (use := _use(view, node)):
        yield use
        return
    for child in node.children:
        yield from _uses(view, child)


def _first_names(module: cst.Module) -> Iterator[str]:
    """What imports of torch and DeepSpeed bind, in any scope."""
    for node in walk(module):
        if not isinstance(node, ImportStatement) or isinstance(node.names, cst.ImportStar):
            continue
        home = node.module if isinstance(node, cst.ImportFrom) else None
        for alias in node.names:
            name = f"{dotted(home)}.{alias.evaluated_name}" if home else alias.evaluated_name
            if name.startswith(("torch", "deepspeed")):
                bound = alias.evaluated_alias or alias.evaluated_name
                yield bound.partition(".")[0]


def _use(view: FileView, node: cst.Name | cst.Attribute) -> Use | None:
    if not view.may_be_foreign(node):
        return None
    names = view.names(node)
    imported = [name for name, is_import in names.items() if is_import]
    for name in imported:
        known = know(name)
        if known is None and isinstance(node, cst.Attribute) and _is_known(view, node.value):
            return None  # something of a known name: that is the use
        if known is not None or leads_to_known(name) or _is_foreign(name):
            return Use(node, known, name, is_certain=len(names) == 1)
    return None


def _is_known(view: FileView, node: cst.CSTNode) -> bool:
    return any(know(name) is not None for name, imported in view.names(node).items() if imported)


def _is_foreign(name: str) -> bool:
    """A name below a module of another engine, which no table has."""
    return name.startswith(
        ("torch.distributed.fsdp.", "torch.distributed._composable.fsdp.", "deepspeed.")
    )
