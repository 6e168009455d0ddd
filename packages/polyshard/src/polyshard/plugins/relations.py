"""What plugins declare of each other: requirements with versions, conflicts, order."""

from __future__ import annotations

import heapq
import importlib.metadata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from polyshard.__about__ import __version__
from polyshard.errors import ConflictError, PluginError
from polyshard.plugins.contract import Contract

_OPERATORS = "<>=!~"


@dataclass(frozen=True)
class Need:
    """One word of ``requires``: a plugin or capability, or a plugin of certain versions."""

    text: str
    word: str
    versions: SpecifierSet

    @classmethod
    def parse(cls, plugin: str, text: str) -> Need:
        """``"obs"`` or ``"obs>=2,<3"``, as ``plugin`` declares it.

        Raises:
            PluginError: for bounds that are none.
        """
        at = next((i for i, letter in enumerate(text) if letter in _OPERATORS), len(text))
        word, bounds = text[:at].strip(), text[at:]
        try:
            if not word:
                raise InvalidSpecifier("no name stands before the bounds")
            return cls(text, word, SpecifierSet(bounds))
        except InvalidSpecifier as error:
            raise PluginError(
                f"plugin '{plugin}': requires has '{text}', which is no name with version bounds "
                f"such as 'name>=2,<3': {error}."
            ) from error

    def objection(self, present: Sequence[Contract], here: str) -> str | None:
        """Why ``present`` plugins, which are ``here``, do not meet it; to read after "requires"."""
        able = [c for c in present if self.word in c.answers_to()]
        if not able:
            return f"'{self.text}', which no plugin {here} is or provides"
        named = next((c for c in able if c.name == self.word), None)
        if named is None and self.versions:
            return (
                f"'{self.text}', but '{self.word}' is a capability of '{able[0].name}', and "
                "capabilities have no versions; name the plugin"
            )
        if named is None or self.versions.contains(named.version, prereleases=True):
            return None
        return f"'{self.text}', but '{self.word}' is {named.version}"


def unmet(contract: Contract, present: Sequence[Contract], here: str) -> Iterator[str]:
    """What ``contract`` requires and ``present`` plugins, which are ``here``, do not give."""
    for text in sorted(contract.requires):
        objection = Need.parse(contract.name, text).objection(present, here)
        if objection is not None:
            yield f"requires {objection}"


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


def check_relations(contracts: Sequence[Contract]) -> None:
    """Missing requirements and conflicts, all reported at once.

    Raises:
        PluginError: for requirements nobody meets.
        ConflictError: when plugins exclude each other (and nothing else is wrong).
    """
    words = ", ".join(sorted({word for c in contracts for word in c.answers_to()}))
    problems = [
        f"plugin '{contract.name}' {need} (present: {words}); add one to plugins="
        for contract in contracts
        for need in unmet(contract, contracts, "of the stack")
    ]
    conflicts = [
        f"plugin '{a.name}' conflicts with '{b.name}' (declared by '{a.name}': "
        f"{', '.join(sorted(a.conflicts_with & b.answers_to()))}); drop one of them from plugins="
        for a in contracts
        for b in contracts
        if a is not b and a.conflicts_with & b.answers_to()
    ]
    if problems:
        raise PluginError("\n".join(problems + conflicts))
    if conflicts:
        raise ConflictError("\n".join(conflicts))


def order(contracts: Sequence[Contract]) -> list[str]:
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
    ready, ordered = list(sorter.get_ready()), list[str]()
    heapq.heapify(ready)
    while ready:
        ordered.append(heapq.heappop(ready))
        sorter.done(ordered[-1])
        for name in sorter.get_ready():
            heapq.heappush(ready, name)
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
