"""A strict layer over pluggy: what that accepts in silence is an error here, all at once.

One manager serves one stack and is asked only while plans are built. It calls implementations one
by one instead of through ``pm.hook``, so that every answer and every exception has a name on it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

import pluggy

from polyshard import hookspecs
from polyshard.contract import ATTRIBUTE, Contract, contract_of, settings_of
from polyshard.errors import PluginError
from polyshard.markers import HOOK_API, PROJECT

TRACE = "POLYSHARD_TRACE"
"""Environment variable: set to 1 to have every hook call shown on stderr."""

_IMPLEMENTATION = f"{PROJECT}_impl"
_PREFIX = f"{PROJECT}_"
_ONION = ("pre_flatten_transform", "post_unflatten_transform")


@functools.cache
def hook_arguments() -> Mapping[str, tuple[str, ...]]:
    """Every hook and its arguments, in the order of the specification."""
    marked = vars(hookspecs).items()
    return MappingProxyType(
        {
            name: tuple(inspect.signature(spec).parameters)
            for name, spec in marked
            if hasattr(spec, f"{PROJECT}_spec")
        }
    )


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
class Implementation:
    """One plugin's function for one hook: all that outlives pluggy's manager."""

    member: Member
    hook: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    trace: bool

    def __call__(self, given: Mapping[str, Any]) -> Any:
        """The answer to what it takes of ``given``; an exception gets the names of both."""
        begin = time.perf_counter() if self.trace else 0.0
        try:
            return self.function(*(given[name] for name in self.arguments))
        except Exception as error:
            error.add_note(f"raised by plugin {self.member.label} in {self.hook}")
            raise
        finally:
            if self.trace:
                seconds = time.perf_counter() - begin
                sys.stderr.write(f"polyshard: {self.hook} {self.member.label} {seconds:.6f} s\n")


@dataclass(frozen=True)
class Answer:
    """What one plugin returned to a hook."""

    member: Member
    value: Any


def _candidates(plugin: object) -> Iterator[tuple[str, Any]]:
    """What of a plugin is, or looks like, a hook implementation."""
    hooks = hook_arguments()
    for name in dir(plugin):
        if name.startswith("__") or name == ATTRIBUTE:
            continue
        found = inspect.getattr_static(plugin, name, None)
        if not isinstance(found, property):  # whose value may be costly
            found = getattr(plugin, name, None)
        if not inspect.isroutine(found):
            if name in hooks and found is not None:  # None turns an inherited hook off
                yield name, found
        elif hasattr(found, _IMPLEMENTATION) or name in hooks or name.startswith(_PREFIX):
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
    try:
        written_for = contract_of(plugin).hook_api
    except PluginError as error:
        return [*problems, str(error)]
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
    problems.extend(_problems_together(found))
    return problems


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _problems_together(found: Sequence[tuple[str, Any]]) -> Iterator[str]:
    """What is wrong with the implementations of one plugin taken together."""
    implemented: dict[str, list[str]] = defaultdict(list)
    for name, function in found:
        options = getattr(function, _IMPLEMENTATION, None)
        if options is not None:
            implemented[options.get("specname") or name].append(name)
    for hook, names in implemented.items():
        if len(names) > 1:
            shown = " and ".join(f"'{name}'" for name in names)
            yield f"{shown} all implement '{hook}'; a plugin has one answer, so keep one"
    for one, other in (_ONION, _ONION[::-1]):
        if one in implemented and other not in implemented:
            yield f"it implements '{one}' without '{other}'; one undoes the other, so add it"


def _problems_of_hook(name: str, function: Any) -> Iterator[str]:
    hooks = hook_arguments()
    if not inspect.isroutine(function):
        kind = type(function).__name__
        yield f"'{name}' is a {kind} and not a function, so it would never be called"
        return
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
    elif inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        yield f"'{name}' is a coroutine or generator; return the answer from a plain function"
    for option in ("tryfirst", "trylast"):
        if options.get(option):
            yield f"'{name}' sets {option}; order is declared with before and after instead"
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

    def _ordered(self, manager: pluggy.PluginManager, hook: str) -> list[Implementation]:
        trace = os.environ.get(TRACE) == "1"
        found = getattr(manager.hook, hook).get_hookimpls()
        return [
            Implementation(member, hook, one.function, tuple(one.argnames), trace)
            for member in self._members
            for one in found
            if one.plugin is member.plugin
        ]

    def implements(self, hook: str) -> list[Member]:
        """Plugins that implement ``hook``, in order."""
        return [implementation.member for implementation in self._implementations[hook]]

    def implementation(self, hook: str, member: Member) -> Implementation | None:
        """The function of one plugin, to be called without the manager."""
        for implementation in self._implementations[hook]:
            if implementation.member is member:
                return implementation
        return None

    def ask(self, hook: str, *, leave_out: str = "", **arguments: Any) -> list[Answer]:
        """Call every implementation but that of ``leave_out``; ``None`` is no answer.

        An exception gets a note that names the plugin and the hook.
        """
        answers = []
        for implementation in self._implementations[hook]:
            if implementation.member.contract.name == leave_out:
                continue
            value = self._call(implementation, arguments)
            if value is not None:
                answers.append(Answer(implementation.member, value))
        return answers

    def _call(self, implementation: Implementation, arguments: Mapping[str, Any]) -> Any:
        known = set(hook_arguments()[implementation.hook])
        assert arguments.keys() == known, implementation.hook
        return implementation(arguments)
