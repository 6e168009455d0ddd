"""A strict layer over pluggy: what that accepts in silence is an error here, all at once.

One manager serves one stack and is asked only while plans are built. It calls implementations one
by one instead of through ``pm.hook``, so that every answer and every exception has a name on it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, TypeVar

import pluggy
from typing_extensions import override

from polyshard.plugins import hookspecs
from polyshard.plugins.contract import PROJECT, Contract, contract_of, settings_of
from polyshard.plugins.validation import hook_arguments

TRACE = "POLYSHARD_TRACE"
"""Environment variable: set to 1 to have every hook call shown on stderr."""

T = TypeVar("T")


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

    @property
    def line(self) -> str:
        """All of it in a plan."""
        shown = f" ({self.settings})" if self.settings else ""
        return f"{self.contract.name} {self.contract.version}{shown}"

    @property
    def origin(self) -> str:
        """Where the plugin was defined."""
        plugin = self.plugin
        if isinstance(plugin, ModuleType):
            return plugin.__name__
        return f"{type(plugin).__module__}.{type(plugin).__qualname__}"

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
class Answer(Generic[T]):
    """What one plugin returned to a hook."""

    member: Member
    value: T


def tracing() -> bool:
    """Whether hook calls of stacks that are made now are shown."""
    return os.environ.get(TRACE) == "1"


class _PluginManager(pluggy.PluginManager):
    """pluggy's manager without its search of names that no hook has, which every object has."""

    @override
    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        """As pluggy; nothing for what ``validation`` does not look at either."""
        return None if name.startswith("__") else super().parse_hookimpl_opts(plugin, name)


def _registered(members: Sequence[Member]) -> dict[str, list[Implementation]]:
    """The functions of ``members`` by hook, in their order."""
    if not members:
        return {}  # pluggy would read all specifications first
    manager = _PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    for member in members:
        manager.register(member.plugin, name=member.contract.name)
    manager.check_pending()
    trace = tracing()
    return {
        hook: [
            Implementation(member, hook, one.function, tuple(one.argnames), trace)
            for member in members
            for one in getattr(manager.hook, hook).get_hookimpls()
            if one.plugin is member.plugin
        ]
        for hook in hook_arguments()
    }


class Manager:
    """The plugins of one stack, validated, in an order given by the caller."""

    def __init__(self, members: Sequence[Member], last: Manager | None = None) -> None:
        """Register all; they have been checked (see :mod:`polyshard.plugins.validation`).

        ``last`` holds plugins that answer after all of them.
        """
        own = _registered(members)
        others = {} if last is None else last._implementations
        self._implementations: Mapping[str, Sequence[Implementation]] = {
            hook: (*own.get(hook, ()), *others.get(hook, ())) for hook in hook_arguments()
        }

    def hooks_of(self, member: Member) -> frozenset[str]:
        """The hooks that ``member`` implements."""
        every = self._implementations.items()
        return frozenset(hook for hook, found in every if any(i.member is member for i in found))

    def implementations(self, hook: str) -> Sequence[Implementation]:
        """The functions for ``hook``, in order, to be called without the manager."""
        return self._implementations[hook]

    def ask(self, hook: str, *, leave_out: str = "", **arguments: Any) -> list[Answer[Any]]:
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
