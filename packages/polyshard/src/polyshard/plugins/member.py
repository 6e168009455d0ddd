"""A plugin of a stack: what it declares, and its functions, which pluggy finds.

They are called one by one instead of through ``pm.hook``, so that every answer and every exception
has a name on it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import pluggy
from typing_extensions import override

from polyshard.__about__ import __version__
from polyshard.plugins import hookspecs
from polyshard.plugins.contract import PROJECT, Contract, contract_of, settings_of

ENGINE = "engine"
"""What errors and plans call the engine where its own part takes a role."""
TRACE = "POLYSHARD_TRACE"
"""Environment variable: set to 1 to have every hook call of stacks made then shown on stderr."""
RANKS_MAY_DIFFER = frozenset({"polyshard_observer", "polyshard_plugin_state", "polyshard_teardown"})
"""Hooks that change nothing of what ranks do together: a plugin that has no other may be passed on
some ranks only, or with other settings there."""


@dataclass(frozen=True, eq=False)
class Member:
    """A plugin with its contract, its settings as text, and its functions by hook."""

    plugin: object
    contract: Contract
    settings: str = ""
    hooks: Mapping[str, pluggy.HookImpl] = field(default_factory=dict)
    is_traced: bool = False

    @classmethod
    def of(cls, plugin: object) -> Member:
        """Read what ``plugin`` declares; :func:`registered` finds its functions."""
        return cls(plugin, contract_of(plugin), settings_of(plugin))

    @property
    def name(self) -> str:
        """That of its contract."""
        return self.contract.name

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
    def is_local(self) -> bool:
        """Whether it only looks on: shown in plans, not compared between ranks."""
        return self.hooks.keys() <= RANKS_MAY_DIFFER

    @property
    def origin(self) -> str:
        """Where the plugin was defined."""
        plugin = self.plugin
        if isinstance(plugin, ModuleType):
            return plugin.__name__
        return f"{type(plugin).__module__}.{type(plugin).__qualname__}"

    def call(self, hook: str, given: Mapping[str, Any]) -> Any:
        """The answer to what it takes of ``given``; an exception gets the names of both."""
        found = self.hooks[hook]
        begin = time.perf_counter() if self.is_traced else 0.0
        try:
            return found.function(*(given[name] for name in found.argnames))
        except Exception as error:
            error.add_note(f"raised by plugin {self.label} in {hook}")
            raise
        finally:
            if self.is_traced:
                seconds = time.perf_counter() - begin
                sys.stderr.write(f"polyshard: {hook} {self.label} {seconds:.6f} s\n")


THE_ENGINE = Member(None, Contract(ENGINE, __version__))
"""What answers for a role that no plugin claims."""


class _PluginManager(pluggy.PluginManager):
    """pluggy's manager without its search of names that no hook has, which every object has."""

    @override
    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        """As pluggy; nothing for what ``validation`` does not look at either."""
        return None if name.startswith("__") else super().parse_hookimpl_opts(plugin, name)


def registered(members: Sequence[Member]) -> list[Member]:
    """``members``, which have been checked, with the functions that pluggy finds."""
    if not members:
        return []  # pluggy would read all specifications first
    manager = _PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    for member in members:
        manager.register(member.plugin, name=member.name)
    manager.check_pending()
    found: dict[str, dict[str, pluggy.HookImpl]] = {member.name: {} for member in members}
    for hook, caller in vars(manager.hook).items():
        for implementation in caller.get_hookimpls():
            found[implementation.plugin_name][hook] = implementation
    is_traced = os.environ.get(TRACE) == "1"
    return [replace(m, hooks=found[m.name], is_traced=is_traced) for m in members]
