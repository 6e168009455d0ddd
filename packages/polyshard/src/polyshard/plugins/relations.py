"""What plugins declare of each other: requirements with versions, conflicts, order."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from polyshard.__about__ import __version__
from polyshard.errors import ConflictError, PluginError
from polyshard.plugins.contract import BOUNDS, Contract


def unmet(contract: Contract, present: Sequence[Contract], here: str) -> Iterator[str]:
    """What ``contract`` requires and ``present`` plugins, which are ``here``, do not give."""
    for text in sorted(contract.requires):
        objection = _objection(contract.name, text, present, here)
        if objection is not None:
            yield f"requires '{text}', {objection}"


def _objection(plugin: str, text: str, present: Sequence[Contract], here: str) -> str | None:
    """Why ``present`` plugins do not give what ``text`` says, ``"obs"`` or ``"obs>=2,<3"``.

    Raises:
        PluginError: for bounds that are none.
    """
    word = BOUNDS.split(text, maxsplit=1)[0]
    try:
        if not word.strip():
            raise InvalidSpecifier("no name stands before the bounds")
        versions = SpecifierSet(text[len(word) :])
    except InvalidSpecifier as error:
        raise PluginError(
            f"plugin '{plugin}': requires has '{text}', which is no name with version bounds such "
            f"as 'name>=2,<3': {error}."
        ) from error
    word = word.strip()
    able = [contract for contract in present if word in contract.answers_to()]
    if not able:
        return f"which no plugin {here} is or provides"
    named = next((contract for contract in able if contract.name == word), None)
    if named is None and versions:
        return (
            f"but '{word}' is a capability of '{able[0].name}', and capabilities have no "
            "versions; name the plugin"
        )
    if named is None or versions.contains(named.version, prereleases=True):
        return None
    return f"but '{word}' is {named.version}"


def unmet_by_polyshard(distribution: importlib.metadata.Distribution | None) -> Iterator[str]:
    """Bounds of a distribution on polyshard that this polyshard does not meet."""
    for line in (distribution.requires or []) if distribution else []:
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            yield f"has a requirement that cannot be read: {error}"
            continue
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue  # for another platform or an extra
        named = canonicalize_name(requirement.name) == "polyshard"
        if named and not requirement.specifier.contains(__version__, prereleases=True):
            yield f"needs {requirement}, this is polyshard {__version__}"


def problems_between(contracts: Sequence[Contract]) -> Iterator[PluginError]:
    """Requirements that no plugin meets, and conflicts, which are :class:`ConflictError` s."""
    words = ", ".join(sorted({word for c in contracts for word in c.answers_to()}))
    for contract in contracts:
        try:
            for need in unmet(contract, contracts, "of the stack"):
                yield PluginError(
                    f"plugin '{contract.name}' {need} (present: {words}); add one to plugins="
                )
        except PluginError as error:
            yield error
    for a in contracts:
        for b in contracts:
            if a is not b and (excluded := a.conflicts_with & b.answers_to()):
                yield ConflictError(
                    f"plugin '{a.name}' conflicts with '{b.name}' (declared by '{a.name}': "
                    f"{', '.join(sorted(excluded))}); drop one of them from plugins="
                )


def in_order(contracts: Sequence[Contract]) -> list[str]:
    """Names in plugin order: ``before`` and ``after`` hold, ties go by name.

    Raises:
        ConflictError: showing the circle, when the declarations form one.
    """
    if circle := circle_of(contracts):
        raise ConflictError(
            f"plugins cannot be ordered: {' before '.join(circle)}. Remove one of these before= or "
            "after= declarations."
        )
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
