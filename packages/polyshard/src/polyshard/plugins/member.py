"""A plugin of a stack: what it declares, and its functions.

pluggy marks them. They are called one by one instead of through its manager, so that every answer
and every exception has a name on it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from polyshard.__about__ import __version__
from polyshard.plugins.contract import Contract, contract_of, settings_of
from polyshard.plugins.validation import Implementation, examined

ENGINE = "engine"
"""What errors and plans call the engine where its own part takes a role."""
TRACE = "POLYSHARD_TRACE"
"""Environment variable: set to 1 to have every hook call of stacks made then shown on stderr."""
RANKS_MAY_DIFFER = frozenset({"polyshard_observer", "polyshard_plugin_state", "polyshard_teardown"})
"""Hooks that change nothing of what ranks do together: a plugin that has no other may be passed on
some ranks only, or with other settings there."""


@dataclass(frozen=True, eq=False)
class Member:
    """A plugin with its contract, its settings as text, its functions, and what is wrong."""

    plugin: object
    contract: Contract
    settings: str = ""
    hooks: Mapping[str, Implementation] = field(default_factory=dict)
    problems: Sequence[str] = ()
    is_traced: bool = False

    @classmethod
    def of(cls, plugin: object) -> Member:
        """Read what ``plugin`` declares, as :func:`contract_of` does, and implements."""
        contract, is_traced = contract_of(plugin), os.environ.get(TRACE) == "1"
        return cls(plugin, contract, settings_of(plugin), *examined(plugin, contract), is_traced)

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
        function, arguments = self.hooks[hook]
        begin = time.perf_counter() if self.is_traced else 0.0
        try:
            return function(*(given[name] for name in arguments))
        except Exception as error:
            error.add_note(f"raised by plugin {self.label} in {hook}")
            raise
        finally:
            if self.is_traced:
                seconds = time.perf_counter() - begin
                sys.stderr.write(f"polyshard: {hook} {self.label} {seconds:.6f} s\n")


THE_ENGINE = Member(None, Contract(ENGINE, __version__))
"""What answers for a role that no plugin claims."""
