"""What a plugin declares: hooks by two markers, itself by a contract; and how contracts fit.

Importable without torch.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from types import ModuleType
from typing import ClassVar

import pluggy
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from polyshard.errors import ConflictError, PluginError

PROJECT = "polyshard"
HOOK_API = (1, 1)
"""Version of the hook specifications (major, minor). A new hook or argument is a minor change; a
changed meaning is a major one, and plugins written for another major are refused."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

ATTRIBUTE = "polyshard_contract"
"""Where a plugin of any kind keeps its contract."""

_RELATIONS = ("provides", "requires", "conflicts_with", "before", "after")
_BOUNDS = re.compile(r"[<>=!~]")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Contract:
    """Name, version and relations of a plugin.

    Attributes:
        name: unique in a stack; what errors, plans and ``before``/``after`` use.
        version: of the plugin; ranks must agree on it.
        provides: capabilities, as free words, that others may require.
        requires: plugin names or capabilities that must be in the stack; a plugin's name may have
            bounds on its version, ``"obs>=2,<3"``.
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

    def __post_init__(self) -> None:
        """Refuse what would be misread later, with the names of the plugin and the field."""
        name: object = self.name
        if not (isinstance(name, str) and name.strip()):
            raise PluginError(f"a plugin's name must be a text that is not empty, got {name!r}.")
        try:
            Version(self.version)
        except (InvalidVersion, TypeError) as error:
            raise PluginError(
                f"plugin '{name}': its version must be one such as '1.2', got {self.version!r}."
            ) from error
        for relation in _RELATIONS:
            value = _words(self.name, relation, getattr(self, relation))
            object.__setattr__(self, relation, value)
        api: object = self.hook_api
        if not (isinstance(api, tuple) and list(map(type, api)) == [int, int]):
            raise PluginError(
                f"plugin '{self.name}': hook_api must be two integers such as {HOOK_API}, got "
                f"{api!r}."
            )

    def answers_to(self) -> frozenset[str]:
        """Everything another plugin may mean this one by."""
        return self.provides | {self.name}


def _words(plugin: str, relation: str, value: Iterable[str]) -> frozenset[str]:
    # A string is an iterable of strings as well: its letters, which are never meant.
    words = () if isinstance(value, str) else tuple(value)
    if isinstance(value, str) or not all(isinstance(word, str) for word in words):
        raise PluginError(
            f"plugin '{plugin}': {relation} takes several names, got {value!r}; write "
            f"{relation} = ('name',)."
        )
    for word in words:
        if relation == "requires":
            _needed(plugin, word)
        elif _BOUNDS.search(word):
            raise PluginError(
                f"plugin '{plugin}': {relation} takes names without version bounds, got {word!r}; "
                "only requires may have them."
            )
    return frozenset(words)


def _needed(plugin: str, text: str) -> tuple[str, SpecifierSet]:
    """Name and bounds in what ``plugin`` requires, ``"obs"`` or ``"obs>=2,<3"``."""
    word = _BOUNDS.split(text, maxsplit=1)[0]
    try:
        if not word.strip():
            raise InvalidSpecifier("no name stands before the bounds")
        return word.strip(), SpecifierSet(text[len(word) :])
    except InvalidSpecifier as error:
        raise PluginError(
            f"plugin '{plugin}': requires has '{text}', which is no name with version bounds such "
            f"as 'name>=2,<3': {error}."
        ) from error


class Plugin:
    """Base of a plugin: subclass, name it, and implement the hooks it cares about.

    Class attributes declare the contract. Fields of a dataclass are settings, which all ranks
    compare; use ``@dataclass(frozen=True, eq=False)``: plugins are told apart by identity.
    """

    name: ClassVar[str]
    """That of the class, unless given."""
    version: ClassVar[str]
    """That of the distribution named like the package of the class, unless given; else "0"."""
    provides: ClassVar[Iterable[str]] = ()
    requires: ClassVar[Iterable[str]] = ()
    conflicts_with: ClassVar[Iterable[str]] = ()
    before: ClassVar[Iterable[str]] = ()
    after: ClassVar[Iterable[str]] = ()
    hook_api: ClassVar[tuple[int, int]] = HOOK_API

    @property
    def polyshard_contract(self) -> Contract:
        """The class attributes as a contract."""
        names = [f.name for f in dataclasses.fields(Contract)]
        given = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return dataclasses.replace(_plain(self), **given)


def _plain(plugin: object) -> Contract:
    """A contract under the name of the module or class of a plugin that declares nothing."""
    kind = plugin if isinstance(plugin, type | ModuleType) else type(plugin)
    home = getattr(kind, "__module__", kind.__name__)
    return Contract(kind.__name__.rpartition(".")[2], _version_of(home.partition(".")[0]))


def contract_of(plugin: object) -> Contract:
    """The contract a plugin declares, or a plain one under the name of its module or class.

    Raises:
        PluginError: when it declares something that is no contract.
    """
    is_class = isinstance(plugin, type)  # a mistake of its own, to be reported under the right name
    # Not getattr with a default: that would take an AttributeError inside a property for absence.
    if is_class or inspect.getattr_static(plugin, ATTRIBUTE, None) is None:
        return _plain(plugin)
    declared = getattr(plugin, ATTRIBUTE)
    if not isinstance(declared, Contract):
        raise PluginError(
            f"plugin '{_plain(plugin).name}': its {ATTRIBUTE} is a {type(declared).__name__}; make "
            "it a polyshard.Contract(...)."
        )
    return declared


@functools.cache
def _version_of(package: str) -> str:
    """Of the distribution of the same name: reading all files of all takes half a second."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "0"


def settings_of(plugin: object) -> str:
    """The fields of a dataclass plugin as text, in the order they are declared.

    Ranks compare it: equal settings give equal text, with sets sorted and addresses left out.
    """
    if not dataclasses.is_dataclass(plugin) or isinstance(plugin, type):
        return ""
    shown = (f.name for f in dataclasses.fields(plugin) if f.repr)
    return ", ".join(f"{name}={_text(getattr(plugin, name))}" for name in shown)


def _text(value: object) -> str:
    """``repr(value)``, the same in every process."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__qualname__}({settings_of(value)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(_text, value))) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    if type(value) is tuple:
        return "(" + ", ".join(map(_text, value)) + ("," if len(value) == 1 else "") + ")"
    return _ADDRESS.sub("", repr(value))


def unmet(contract: Contract, present: Sequence[Contract], here: str) -> Iterator[str]:
    """What ``contract`` requires and ``present`` plugins, which are ``here``, do not give."""
    for text in sorted(contract.requires):
        word, versions = _needed(contract.name, text)
        able = [other for other in present if word in other.answers_to()]
        version = next((other.version for other in able if other.name == word), None)
        if not able:
            yield f"requires '{text}', which no plugin {here} is or provides"
        elif version is None and versions:
            yield (
                f"requires '{text}', but '{word}' is a capability of '{able[0].name}', and "
                "capabilities have no versions; name the plugin"
            )
        elif version is not None and not versions.contains(version, prereleases=True):
            yield f"requires '{text}', but '{word}' is {version}"


def problems_between(contracts: Sequence[Contract]) -> Iterator[PluginError]:
    """Requirements that no plugin meets; conflicts and a circle are :class:`ConflictError` s."""
    words = ", ".join(sorted({word for c in contracts for word in c.answers_to()}))
    for one in contracts:
        for need in unmet(one, contracts, "of the stack"):
            yield PluginError(f"plugin '{one.name}' {need} (present: {words}); add one to plugins=")
        for other in contracts:
            if one is not other and (excluded := one.conflicts_with & other.answers_to()):
                yield ConflictError(
                    f"plugin '{one.name}' conflicts with '{other.name}' (declared by "
                    f"'{one.name}': {', '.join(sorted(excluded))}); drop one of them from plugins="
                )
    if circle := circle_of(contracts):
        yield ConflictError(
            f"plugins cannot be ordered: {' before '.join(circle)}. Remove one of these before= or "
            "after= declarations."
        )


def in_order(contracts: Sequence[Contract]) -> list[str]:
    """Names in plugin order: ``before`` and ``after`` hold, ties go by name."""
    sorter = _sorter(contracts)
    sorter.prepare()
    ready, ordered = set(sorter.get_ready()), list[str]()
    while ready:
        ordered.append(min(ready))
        ready.remove(ordered[-1])
        sorter.done(ordered[-1])
        ready.update(sorter.get_ready())
    return ordered


def circle_of(contracts: Sequence[Contract]) -> list[str]:
    """Names of plugins that declare to come before each other, the first repeated; or none."""
    try:
        _sorter(contracts).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1][:-1]
        start = circle.index(min(circle))
        return [*circle[start:], *circle[:start], circle[start]]
    return []


def _sorter(contracts: Sequence[Contract]) -> TopologicalSorter[str]:
    present = {c.name for c in contracts}
    sorter = TopologicalSorter[str](dict.fromkeys(sorted(present), ()))
    for contract in sorted(contracts, key=lambda c: c.name):
        sorter.add(contract.name, *sorted(contract.after & present))
        for later in sorted(contract.before & present):
            sorter.add(later, contract.name)
    return sorter
