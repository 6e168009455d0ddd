"""Calls that wrap a module, as FSDP1 and DDP have them, on their way to ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import libcst as cst

from polyshard_cli.migrate.editing.draft import Draft, Edit
from polyshard_cli.migrate.editing.finding import Finding, Kind
from polyshard_cli.migrate.source.view import FileView, Use, dotted
from polyshard_cli.migrate.terms.term import Table, Term, Verdict

__all__ = [
    "Shape",
    "Wrapping",
    "bind",
    "call_with",
    "check_optimizer",
    "is_word",
    "keyword",
    "report_methods",
    "report_module",
    "report_uses",
]


@dataclass
class Wrapping:
    """One call that wraps, and what it becomes.

    Attributes:
        view, use, call: where it is; ``use`` is its function.
        kept: arguments that stay, under which keyword (empty: positional) and with which value
            (``None``: their own).
        added: keywords that are new, as text.
        needed: names of polyshard that it takes.
        edits, consumed, findings: as of a draft, which gets them if nothing is left.
        left: what needs a hand; if any, nothing is done.
        classes, takes: which modules are units of their own, as an expression: classes, or a
            function.
    """

    view: FileView
    use: Use
    call: cst.Call
    kept: dict[cst.Arg, tuple[str, str | None]] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)
    needed: set[str] = field(default_factory=lambda: {"fully_shard"})
    edits: dict[cst.CSTNode, Edit] = field(default_factory=dict)
    consumed: set[cst.CSTNode] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)
    left: list[Finding] = field(default_factory=list)
    classes: str = ""
    takes: str = ""

    @property
    def module(self) -> cst.Arg | None:
        """The argument that is wrapped."""
        return next((arg for arg, (name, _) in self.kept.items() if not name), None)

    def keywords(self) -> dict[str, str]:
        """Of ``fully_shard``, each with its text."""
        kept = {
            name: self.view.code(arg.value) if text is None else text
            for arg, (name, text) in self.kept.items()
            if name
        }
        return kept | self.added

    def drop(self, arg: cst.Arg, term: Term) -> None:
        """Leave out an argument of which nothing has to be done."""
        self.consumed.add(arg)
        if term.differs:
            line = self.view.line(arg)
            self.findings.append(Finding(line, Kind.DIFFERS, term.theirs, term.differs))

    def leave(self, node: cst.CSTNode, term: Term, why: str) -> None:
        """Leave the call to the hand because of ``node``."""
        kind = Kind.REFUSED if term.verdict is Verdict.REFUSED else Kind.HAND
        self.left.append(Finding(self.view.line(node), kind, term.theirs, why, term.ours))


def bind(call: cst.Call, names: Sequence[str]) -> dict[str, cst.Arg] | None:
    """Arguments by name; ``None`` where stars or strangers make them unknown."""
    found: dict[str, cst.Arg] = {}
    for position, arg in enumerate(call.args):
        if arg.star or (arg.keyword is None and position >= len(names)):
            return None
        name = names[position] if arg.keyword is None else arg.keyword.value
        if name not in names or name in found:
            return None
        found[name] = arg
    return found


def is_word(node: cst.BaseExpression, *words: str) -> bool:
    """Whether ``node`` is one of ``words``: ``None``, ``True``, ``False``, ``0``."""
    return isinstance(node, cst.Name | cst.Integer) and node.value in words


def keyword(name: str, text: str) -> cst.Arg:
    """``name=text`` as an argument."""
    return cst.Arg(
        cst.parse_expression(text),
        keyword=cst.Name(name),
        equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
    )


@dataclass(frozen=True)
class Shape:
    """What a call becomes: its function, which arguments stay under which name, which are new."""

    function: str
    kept: Mapping[int, tuple[str, str | None]]
    added: Mapping[str, str]


def call_with(shape: Shape) -> Edit:
    """An edit of a call, which keeps the layout of arguments that stay."""

    def edit(node: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(node, cst.Call)
        args: list[cst.Arg] = []
        # What is passed without a name comes first, wherever the call had it.
        for at, (name, text) in sorted(shape.kept.items(), key=lambda each: bool(each[1][0])):
            old = node.args[at]
            value = old.value if text is None else cst.parse_expression(text)
            args.append(_named(old.with_changes(value=value), name))
        args += [keyword(name, text) for name, text in shape.added.items()]
        return node.with_changes(func=cst.parse_expression(shape.function), args=_laid(node, args))

    return edit


def _named(arg: cst.Arg, name: str) -> cst.Arg:
    if not name:
        return arg.with_changes(keyword=None, equal=cst.MaybeSentinel.DEFAULT)
    if arg.keyword is not None:
        return arg.with_changes(keyword=cst.Name(name))
    return keyword(name, "None").with_changes(value=arg.value, comma=arg.comma)


def _laid(node: cst.Call, args: list[cst.Arg]) -> list[cst.Arg]:
    """Commas and line breaks as the call had them; the last argument ends as its last one did."""
    if not args or not node.args:
        return args
    first, last = node.args[0], node.args[-1]
    between = first.comma if isinstance(first.comma, cst.Comma) and first is not last else None
    laid = []
    for arg in args[:-1]:
        comma = arg.comma
        if isinstance(comma, cst.MaybeSentinel):
            comma = between or cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        laid.append(arg.with_changes(comma=comma))
    end = args[-1].with_changes(
        comma=_ending(args[-1], last), whitespace_after_arg=last.whitespace_after_arg
    )
    return [*laid, end]


def _ending(arg: cst.Arg, last: cst.Arg) -> cst.Comma | cst.MaybeSentinel:
    """The comma of the last argument: where that ended a line, a comment of ``arg`` stays."""
    if isinstance(last.comma, cst.MaybeSentinel) or isinstance(arg.comma, cst.MaybeSentinel):
        return last.comma
    own, end = arg.comma.whitespace_after, last.comma.whitespace_after
    if isinstance(own, cst.ParenthesizedWhitespace) and isinstance(
        end, cst.ParenthesizedWhitespace
    ):
        end = end.with_changes(first_line=own.first_line)
    return last.comma.with_changes(whitespace_after=end)


LONGEST_CHAIN = 4
"""Of assignments from parameters to an optimizer that are followed."""


def check_optimizer(wrapping: Wrapping, term: Term) -> None:
    """Leave a call before which an optimizer is made: it would hold parameters that are gone."""
    view, module = wrapping.view, wrapping.module
    for mention in view.mentions(_without_calls(module.value)) if module else ():
        if view.is_before(mention, wrapping.call) and _goes_to_optimizer(view, mention):
            line, where = view.line(wrapping.call), view.line(mention)
            why = f"in line {where}, before it, an optimizer is made of the parameters."
            instead = "make the optimizer afterwards"
            wrapping.left.append(Finding(line, Kind.HAND, term.theirs, why, instead))


def _goes_to_optimizer(view: FileView, mention: cst.BaseExpression) -> bool:
    """Whether an optimizer is made of a module's parameters, or by something called like one."""
    access = view.parent(mention)
    if isinstance(access, cst.Attribute) and access.attr.value.endswith("parameters"):
        return _is_for_optimizer(view, access)
    call = view.parent(access) if isinstance(access, cst.Arg | cst.Attribute) else None
    return isinstance(call, cst.Call) and "optimizer" in dotted(call.func).lower()


def _without_calls(node: cst.BaseExpression) -> cst.BaseExpression:
    """``model`` of ``model.to(rank)`` or ``model.cuda().train()``, which return the module."""
    while isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        node = node.func.value
    return node


def _around(view: FileView, call: cst.Call) -> cst.CSTNode:
    """``call``, or what is around it and still the module: compiled, moved, one of two."""
    node: cst.CSTNode = call
    while True:
        parent = view.parent(node)
        outer = view.parent(parent) if isinstance(parent, cst.Arg | cst.Attribute) else parent
        is_method = isinstance(outer, cst.Call) and outer.func is parent
        is_compiled = isinstance(outer, cst.Call) and dotted(outer.func) == "torch.compile"
        if outer is None or not (isinstance(outer, cst.IfExp) or is_method or is_compiled):
            return node
        node = outer


def _is_for_optimizer(
    view: FileView, node: cst.CSTNode, seen: frozenset[cst.CSTNode] = frozenset()
) -> bool:
    """Whether ``node`` is within arguments of a class, or in a variable that is.

    ``seen``: assignments that lead to ``node``.
    """
    for each in view.ancestors(node):
        if isinstance(each, cst.Call) and dotted(each.func).rpartition(".")[2][:1].isupper():
            return True
        if isinstance(each, cst.Assign):
            if each in seen or len(seen) == LONGEST_CHAIN:
                return False
            targets = [target.target for target in each.targets]
            return any(
                _is_for_optimizer(view, mention, seen | {each})
                for target in targets
                if isinstance(target, cst.Name)
                for mention in view.mentions(target)
                if not view.is_before(mention, each) and each not in view.ancestors(mention)
            )
        if isinstance(each, cst.BaseStatement):
            return False
    return False


Rewrite = Callable[[cst.Attribute, cst.Call, Term], bool]

_OF_MODULES = {"state_dict", "load_state_dict"}
"""Methods that modules have without a wrapper; what they do changes where these are sharded."""


def report_uses(draft: Draft, wrapping: Wrapping, table: Table, rewrite: Rewrite) -> None:
    """As :func:`report_methods`, for variables that get what is wrapped, and that it is made of."""
    assign = draft.view.parent(_around(draft.view, wrapping.call))
    targets: list[cst.BaseExpression] = []
    if isinstance(assign, cst.Assign):
        targets = [each.target for each in assign.targets]
    elif isinstance(assign, cst.AnnAssign):
        targets = [assign.target]
    for target in targets:
        report_methods(draft, target, table, rewrite)
    assert wrapping.module is not None
    module = _without_calls(wrapping.module.value)
    if dotted(module) not in map(dotted, targets):
        report_module(draft, module, table, rewrite)


def report_module(draft: Draft, module: cst.BaseExpression, table: Table, rewrite: Rewrite) -> None:
    """As :func:`report_methods`, for the variable of a plain module, which is sharded in place."""
    if dotted(module):
        own = Table(table.title, tuple(t for t in table.terms if t.theirs in _OF_MODULES))
        report_methods(draft, module, own, rewrite)


def report_methods(
    draft: Draft, target: cst.BaseExpression, table: Table, rewrite: Rewrite
) -> None:
    """List or rewrite what is done with a variable that holds a wrapped module.

    Args:
        draft: gets the findings.
        target: the variable, where it is assigned: before, it holds the plain module.
        table: of methods.
        rewrite: makes an edit of a call of a method that the table has rewritten; ``False`` if
            it cannot.
    """
    for mention in draft.view.mentions(target):
        access = draft.view.parent(mention)
        is_read = isinstance(access, cst.Attribute) and access.value is mention
        if not is_read or not isinstance(access, cst.Attribute):
            continue
        if mention is target or draft.view.is_before(mention, target):
            continue
        term = table.find(access.attr.value)
        if term is None or term.verdict in {Verdict.MOVED, Verdict.DROPPED}:
            continue
        call = draft.view.parent(access)
        is_call = isinstance(call, cst.Call) and call.func is access
        can = is_call and term.verdict is Verdict.REWRITTEN
        if not (can and isinstance(call, cst.Call) and rewrite(access, call, term)):
            draft.leave(access, term, f"`{draft.view.code(access)}`: not as with the wrapper.")
