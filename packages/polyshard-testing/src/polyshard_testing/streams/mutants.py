"""Every wait, event and keep-alive of some modules, and the same modules without one of them.

[Note: mutants]
What orders streams is found in the source, by the names of calls: another wait in it is another
mutant. A mutant evaluates what the call is made of and leaves the call out, so everything
else is as it was. Functions are changed in place, in this process.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

LEFT_OUT = frozenset({
    "wait", "wait_event", "wait_stream", "record", "synchronize", "hold", "settle", "launched",
    "result", "exception", "idle", "copied",
})  # fmt: skip
"""Statements that call one of these are left out."""
KEPT = frozenset({"kept", "copied"})
"""Attributes that keep memory in use: adding to them is left out."""


@dataclass(frozen=True)
class Mutant:
    """A module without one of the things that order it."""

    module: str
    function: str
    line: int
    kind: str
    text: str
    tree: ast.Module
    file: str

    def __str__(self) -> str:
        """Where it is, and what it lacks."""
        return f"{self.module}.{self.function}:{self.line}: {self.kind} `{self.text}`"

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have the function be the mutant inside the block."""
        target = _live(self.module, self.function)
        original = target.__code__
        target.__code__ = _code_of(compile(self.tree, original.co_filename, "exec"), self.function)
        try:
            yield
        finally:
            target.__code__ = original


def mutants(modules: Sequence[str], holders: Sequence[str] = ()) -> list[Mutant]:
    """All mutants of ``modules``.

    Args:
        modules: names.
        holders: classes whose objects keep their first argument in use.
    """
    return [mutant for module in modules for mutant in _of_module(module, holders)]


def _of_module(module: str, holders: Sequence[str]) -> Iterator[Mutant]:
    path = importlib.import_module(module).__file__
    assert path is not None
    source = Path(path).read_text()
    tree = ast.parse(source)
    for function, node in _functions(tree):
        for place, inner in enumerate(ast.walk(node)):
            for kind, change in _changes(inner, holders):
                mutated = copy.deepcopy(tree)
                twin = next(n for _, n in _functions(mutated) if n.lineno == node.lineno)
                change(list(ast.walk(twin))[place])
                ast.fix_missing_locations(mutated)
                text = ast.unparse(inner).splitlines()[0]
                yield Mutant(module, function, inner.lineno, kind, text, mutated, path)  # type: ignore[attr-defined]


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods by their qualified names; nested ones are part of the outer."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    yield f"{node.name}.{member.name}", member


Change = Callable[[Any], None]


def _changes(node: ast.AST, holders: Sequence[str]) -> Iterator[tuple[str, Change]]:
    said = node.value if isinstance(node, ast.Expr) else None
    if isinstance(said, ast.Call) and _name(said) in LEFT_OUT:
        yield "without", _leave_out
    if isinstance(node, ast.Call) and _name(node) == "enter" and not node.args:
        yield "unordered", _enter_unordered
    if isinstance(node, ast.Call) and _name(node) == "leave" and _is_lane(node.func):
        yield "not keeping", _keep_nothing
    if isinstance(node, ast.Call) and _name(node) in holders:
        yield "not keeping", partial(_keep_nothing, place=0)
    if isinstance(node, ast.Call) and _name(node) == "finalize":
        yield "without", _finalize_nothing
    if _keeps(node):
        yield "not keeping", _pass_over
    match node:
        case ast.Assign(value=ast.Call() as made) if _name(made) == "mark":
            yield "without", _pass_over


def _name(call: ast.Call) -> str:
    function = call.func
    while isinstance(function, ast.Call):
        function = function.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _keeps(node: ast.AST) -> bool:
    """``x.kept += ...``, or ``x.copied.append(...)``."""
    if isinstance(node, ast.AugAssign):
        held: ast.AST = node.target
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        if _name(node.value) != "append" or not isinstance(node.value.func, ast.Attribute):
            return False
        held = node.value.func.value
    else:
        return False
    return isinstance(held, ast.Attribute) and held.attr in KEPT


def _leave_out(statement: ast.Expr) -> None:
    call = statement.value
    assert isinstance(call, ast.Call)
    statement.value = ast.Tuple([call.func, *call.args], ast.Load())


def _enter_unordered(call: ast.Call) -> None:
    """The lane's stream without what ``enter`` waits for."""
    assert isinstance(call.func, ast.Attribute)
    lane = call.func.value
    stream = ast.Attribute(lane, "stream", ast.Load())
    streams = ast.Attribute(lane, "_streams", ast.Load())
    call.func, call.args = ast.Attribute(streams, "on", ast.Load()), [stream]


def _keep_nothing(call: ast.Call, place: int = -1) -> None:
    both = ast.Tuple([call.args[place], ast.Constant(None)], ast.Load())
    call.args[place] = ast.Subscript(both, ast.Constant(1), ast.Load())


def _is_lane(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and ast.unparse(function.value) == "lane"


def _finalize_nothing(call: ast.Call) -> None:
    """What is called in the end does nothing."""
    call.args[1:] = [ast.Name("bool", ast.Load())]


def _pass_over(statement: Any) -> None:
    """Have the statement do nothing, whatever kind it is."""
    if isinstance(statement, ast.Expr):
        statement.value = ast.Constant(None)
    else:
        statement.value = ast.Tuple([], ast.Load())
        target = statement.target if isinstance(statement, ast.AugAssign) else statement.targets[0]
        if isinstance(target, ast.Subscript):  # of the ends of streams: one that is over
            statement.targets[0] = ast.Name("_", ast.Store())


def _live(module: str, function: str) -> FunctionType:
    found: Any = importlib.import_module(module)
    for part in function.split("."):
        found = inspect.getattr_static(found, part)
        if isinstance(found, property):
            found = found.fget
        found = getattr(found, "__func__", found)
    found = inspect.unwrap(found)
    assert isinstance(found, FunctionType)
    return found


def _code_of(code: CodeType, function: str) -> CodeType:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_qualname == function:
                return constant
            if function.startswith(f"{constant.co_qualname}."):
                return _code_of(constant, function)
    raise LookupError(function)


Attempt = Callable[[], Sequence[str]]
"""Does something, and returns the races it found."""


class Survival:
    """Attempts to have mutants fail, each tried on mutants of what it calls."""

    def __init__(self, attempts: Mapping[str, Attempt]) -> None:
        """Run each once, as it is: there must be no race.

        Args:
            attempts: by a name for reports.
        """
        self._attempts = attempts
        self._calls = {name: _calls_of(attempt) for name, attempt in attempts.items()}

    def end_of(self, mutant: Mutant) -> str | None:
        """What ``mutant`` fails, if it fails anything."""
        called = (mutant.file, mutant.function)
        with mutant.applied():
            for name, attempt in self._attempts.items():
                if called not in self._calls[name]:
                    continue
                try:
                    races = attempt()
                except Exception as error:
                    return f"{name}: {type(error).__name__}: {error}"
                if races:
                    return f"{name}: {races[0]}"
        return None


def _calls_of(attempt: Attempt) -> frozenset[tuple[str, str]]:
    """Files and qualified names of all functions it calls."""
    called: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        del argument
        if event == "call":
            called.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        races = attempt()
    finally:
        sys.setprofile(before)
    assert not races, races
    return frozenset(
        (code.co_filename, code.co_qualname.partition(".<locals>")[0]) for code in called
    )
