"""What plugins and their distributions need of others, with bounds on versions."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from polyshard.__about__ import __version__
from polyshard.errors import PluginError
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
        if not self.versions:
            return None
        named = next((c for c in able if c.name == self.word), None)
        if named is None:
            return (
                f"'{self.text}', but '{self.word}' is a capability of '{able[0].name}', and "
                "capabilities have no versions; name the plugin"
            )
        try:
            fits = self.versions.contains(Version(named.version), prereleases=True)
        except InvalidVersion:
            return f"'{self.text}', and cannot compare '{self.word}' {named.version}"
        return None if fits else f"'{self.text}', but '{self.word}' is {named.version}"


def unmet(contract: Contract, present: Sequence[Contract], here: str) -> Iterator[str]:
    """What ``contract`` requires and ``present`` plugins do not give.

    Args:
        contract: of the plugin that needs something.
        present: of all plugins it may find it in.
        here: where those are, as an error says it.
    """
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
