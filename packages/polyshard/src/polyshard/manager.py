"""A strict layer over pluggy: what that accepts in silence is an error here, all at once.

One manager serves one stack and is asked only while plans are built. It calls implementations one
by one instead of through ``pm.hook``, so that every answer and every exception has a name on it.
"""

from __future__ import annotations

import difflib
import inspect
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pluggy

from polyshard import hookspecs
from polyshard.contract import Contract, contract_of, settings_of
from polyshard.errors import PluginError
from polyshard.markers import HOOK_API, PROJECT

TRACE = "POLYSHARD_TRACE"
"""Environment variable: set to 1 to have every hook call shown on stderr."""

_IMPLEMENTATION = f"{PROJECT}_impl"
_PREFIX = f"{PROJECT}_"
_CONTRACT = "polyshard_contract"


def hook_arguments() -> dict[str, tuple[str, ...]]:
    """Every hook and its arguments, in the order of the specification."""
    marked = vars(hookspecs).items()
    return {
        name: tuple(inspect.signature(spec).parameters)
        for name, spec in marked
        if hasattr(spec, f"{PROJECT}_spec")
    }


@dataclass(frozen=True)
class Member:
    """A plugin of a stack with what it declares."""

    plugin: object
    contract: Contract
    settings: str

    @property
    def label(self) -> str:
        """Name and version, as errors call it."""
        return f"'{self.contract.name}' ({self.contract.version})"

    @classmethod
    def of(cls, plugin: object) -> Member:
        """Read the contract and the settings of ``plugin``."""
        return cls(plugin, contract_of(plugin), settings_of(plugin))


@dataclass(frozen=True)
class Answer:
    """What one plugin returned to a hook."""

    member: Member
    value: Any


def _candidates(plugin: object) -> Iterator[tuple[str, Any]]:
    """Functions of a plugin that are, or look like, hook implementations."""
    hooks = hook_arguments()
    for name in dir(plugin):
        if name.startswith("__") or name == _CONTRACT:
            continue
        if isinstance(inspect.getattr_static(plugin, name), property):
            continue
        found = getattr(plugin, name, None)
        if not inspect.isroutine(found):
            continue
        if hasattr(found, _IMPLEMENTATION) or name in hooks or name.startswith(_PREFIX):
            yield name, found


def problems_of(plugin: object) -> list[str]:
    """Everything wrong with ``plugin`` as a plugin; empty when all is well."""
    if isinstance(plugin, type):
        return [f"it is a class; pass an instance, {plugin.__name__}(...)"]
    problems: list[str] = []
    if not isinstance(plugin, ModuleType) and type(plugin).__eq__ is not object.__eq__:
        problems.append(
            "it overrides __eq__, and plugins are told apart by identity; use "
            "@dataclass(frozen=True, eq=False)"
        )
    written_for = contract_of(plugin).hook_api
    if written_for[0] != HOOK_API[0] or written_for > HOOK_API:
        problems.append(
            f"it was written for hook API {_dotted(written_for)}, this polyshard has "
            f"{_dotted(HOOK_API)}"
        )
    found = list(_candidates(plugin))
    if not found:
        problems.append("it implements no hook; mark its functions with @polyshard.hookimpl")
    for name, function in found:
        problems.extend(_problems_of_hook(name, function))
    return problems


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _problems_of_hook(name: str, function: Any) -> Iterator[str]:
    hooks = hook_arguments()
    options = getattr(function, _IMPLEMENTATION, None)
    if options is None:
        yield f"'{name}' is not marked with @polyshard.hookimpl, so it would never be called"
        return
    hook = options.get("specname") or name
    if hook not in hooks:
        if not options.get("optionalhook"):
            close = difflib.get_close_matches(hook, hooks, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else f"; hooks: {', '.join(hooks)}"
            yield f"no hook is named '{hook}'{hint}"
        return
    if options.get("hookwrapper") or options.get("wrapper"):
        yield f"'{name}' is a hook wrapper; order is declared with before and after instead"
    for parameter in inspect.signature(function).parameters.values():
        yield from _problems_of_argument(name, parameter, hooks[hook])


def _problems_of_argument(
    name: str, parameter: inspect.Parameter, known: Sequence[str]
) -> Iterator[str]:
    if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        kind = parameter.kind.description
        yield f"'{name}' takes '{parameter.name}' {kind}; take it plainly by name"
    elif parameter.name not in known:
        close = difflib.get_close_matches(parameter.name, known, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else f"; it may take {', '.join(known)}"
        yield f"'{name}' takes '{parameter.name}', which the hook does not have{hint}"
    elif parameter.default is not inspect.Parameter.empty:
        yield f"'{name}' gives '{parameter.name}' a default, which would hide the real value"


class Manager:
    """The plugins of one stack, validated, in an order given by the caller."""

    def __init__(self, members: Sequence[Member]) -> None:
        """Register all; raise for everything that is wrong with any of them.

        Raises:
            PluginError: listing every problem of every plugin.
        """
        problems = [
            f"plugin {member.label}: {problem}"
            for member in members
            for problem in problems_of(member.plugin)
        ]
        if problems:
            raise PluginError("\n".join(problems))
        self._members = tuple(members)
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(hookspecs)
        for member in members:
            manager.register(member.plugin, name=member.contract.name)
        manager.check_pending()
        self._implementations = {hook: self._ordered(manager, hook) for hook in hook_arguments()}
        self._trace = os.environ.get(TRACE) == "1"

    def _ordered(
        self, manager: pluggy.PluginManager, hook: str
    ) -> list[tuple[Member, pluggy.HookImpl]]:
        implementations = getattr(manager.hook, hook).get_hookimpls()
        return [
            (member, implementation)
            for member in self._members
            for implementation in implementations
            if implementation.plugin is member.plugin
        ]

    def implements(self, hook: str) -> list[Member]:
        """Plugins that implement ``hook``, in order."""
        return [member for member, _ in self._implementations[hook]]

    def ask(self, hook: str, *, leave_out: str = "", **arguments: Any) -> list[Answer]:
        """Call every implementation but that of ``leave_out``; ``None`` is no answer.

        An exception gets a note that names the plugin and the hook.
        """
        answers = []
        for member, implementation in self._implementations[hook]:
            if member.contract.name == leave_out:
                continue
            value = self._call(member, implementation, hook, arguments)
            if value is not None:
                answers.append(Answer(member, value))
        return answers

    def ask_member(self, hook: str, member: Member, **arguments: Any) -> Any:
        """The answer of one plugin."""
        for candidate, implementation in self._implementations[hook]:
            if candidate is member:
                return self._call(member, implementation, hook, arguments)
        return None

    def _call(
        self, member: Member, implementation: pluggy.HookImpl, hook: str, arguments: dict[str, Any]
    ) -> Any:
        begin = time.perf_counter()
        try:
            return implementation.function(*(arguments[a] for a in implementation.argnames))
        except Exception as error:
            error.add_note(f"raised by plugin {member.label} in {hook}")
            raise
        finally:
            if self._trace:
                seconds = time.perf_counter() - begin
                sys.stderr.write(f"polyshard: {hook} {member.label} {seconds:.6f} s\n")
