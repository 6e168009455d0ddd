"""What a plugin declares about itself, and a base class that declares it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

from polyshard.markers import HOOK_API


@dataclass(frozen=True)
class Contract:
    """Name, version and relations of a plugin.

    Attributes:
        name: unique in a stack; what errors, plans and ``before``/``after`` use.
        version: of the plugin; ranks must agree on it.
        provides: capabilities, as free words, that others may require.
        requires: plugin names or capabilities that must be in the stack.
        conflicts_with: plugin names or capabilities that must not.
        before: plugin names this one comes before, where both are in the stack.
        after: plugin names this one comes after, where both are in the stack.
        hook_api: version of the hook specifications the plugin was written for.
    """

    name: str
    version: str = "0"
    provides: frozenset[str] = frozenset()
    requires: frozenset[str] = frozenset()
    conflicts_with: frozenset[str] = frozenset()
    before: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()
    hook_api: tuple[int, int] = HOOK_API

    def answers_to(self) -> frozenset[str]:
        """Everything another plugin may mean this one by."""
        return self.provides | {self.name}


class Plugin:
    """Base of a plugin: subclass, name it, and implement the hooks it cares about.

    Class attributes declare the contract. The fields of a subclass that is a dataclass count as
    its settings, which all ranks compare; use ``@dataclass(frozen=True, eq=False)``, because the
    plugin manager tells plugins apart by identity.
    """

    name: ClassVar[str] = ""
    version: ClassVar[str] = "0"
    provides: ClassVar[Iterable[str]] = ()
    requires: ClassVar[Iterable[str]] = ()
    conflicts_with: ClassVar[Iterable[str]] = ()
    before: ClassVar[Iterable[str]] = ()
    after: ClassVar[Iterable[str]] = ()
    hook_api: ClassVar[tuple[int, int]] = HOOK_API

    @property
    def polyshard_contract(self) -> Contract:
        """The class attributes as a contract."""
        return Contract(
            name=self.name or type(self).__name__,
            version=self.version,
            provides=frozenset(self.provides),
            requires=frozenset(self.requires),
            conflicts_with=frozenset(self.conflicts_with),
            before=frozenset(self.before),
            after=frozenset(self.after),
            hook_api=self.hook_api,
        )


def contract_of(plugin: object) -> Contract:
    """The contract a plugin declares, or a plain one under the name of its module or class."""
    declared = getattr(plugin, "polyshard_contract", None)
    if isinstance(declared, Contract):
        return declared
    if isinstance(plugin, ModuleType):
        package = plugin.__name__.partition(".")[0]
        return Contract(plugin.__name__.rpartition(".")[2], _version_of(package))
    return Contract(type(plugin).__name__, _version_of(type(plugin).__module__.partition(".")[0]))


def _version_of(package: str) -> str:
    for name in importlib.metadata.packages_distributions().get(package, ()):
        return importlib.metadata.version(name)
    return "0"


def settings_of(plugin: object) -> str:
    """The fields of a dataclass plugin as text, in the order they are declared."""
    if not dataclasses.is_dataclass(plugin) or isinstance(plugin, type):
        return ""
    shown = (f for f in dataclasses.fields(plugin) if f.repr)
    return ", ".join(f"{f.name}={getattr(plugin, f.name)!r}" for f in shown)
