"""Plugins by name: what is installed under the ``polyshard.plugins`` entry points.

pluggy would skip the second of two entry points with one name and stop at the first that fails to
import; scanning here lets both be reported. Being installed never activates a plugin.
"""

from __future__ import annotations

import difflib
import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from polyshard.__about__ import __version__
from polyshard.errors import PluginError

ENTRY_POINTS = "polyshard.plugins"


@dataclass(frozen=True)
class Installed:
    """One entry point, not imported yet."""

    name: str
    distribution: str
    entry_point: EntryPoint

    def load(self) -> object:
        """Import it and make a plugin of it: an instance, a module, or what a factory returns.

        Raises:
            PluginError: if it is for another polyshard or fails, naming it and its distribution.
        """
        for problem in _unmet(self.entry_point.dist):
            raise PluginError(
                f"plugin '{self.name}': {self.distribution} {problem}. Install versions that fit; "
                "'polyshard plugins doctor' checks all."
            )
        label = f"plugin '{self.name}' of {self.distribution} ({self.entry_point.value})"
        try:
            found = self.entry_point.load()
            is_plugin = not isinstance(found, type) and hasattr(found, "polyshard_contract")
            plugin: object = found() if callable(found) and not is_plugin else found
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a module may leave with SystemExit, say: its own problem
            raise PluginError(
                f"{label} failed to load: {type(error).__name__}: {error}. If it has settings "
                "without defaults, pass an object instead of the name."
            ) from error
        if plugin is None:
            raise PluginError(f"{label} is None; a factory must return the plugin.")
        return plugin


def _unmet(distribution: importlib.metadata.Distribution | None) -> Iterator[str]:
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


def installed_plugins() -> list[Installed]:
    """Every plugin that could be named, by name; duplicates included."""
    found = [
        Installed(e.name, f"{e.dist.name} {e.dist.version}" if e.dist else "?", e)
        for e in importlib.metadata.entry_points(group=ENTRY_POINTS)
    ]
    return sorted(found, key=lambda i: (i.name, i.distribution))


def load_plugin(name: str) -> object:
    """The plugin installed as ``name``.

    Raises:
        PluginError: when none or several are, or it cannot be loaded.
    """
    known = installed_plugins()
    matches = [i for i in known if i.name == name]
    if len(matches) > 1:
        owners = " and ".join(i.distribution for i in matches)
        raise PluginError(
            f"plugin '{name}' is provided by {owners}. Uninstall one, or pass the plugin object."
        )
    if not matches:
        names = sorted({i.name for i in known})
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        listed = ", ".join(names) or "none"
        raise PluginError(f"no installed plugin is named '{name}'.{hint} Installed: {listed}.")
    return matches[0].load()


def stand_in(name: str, method: str, purpose: str, *given: object) -> object | None:
    """What ``method(*given)`` of the plugin installed as ``name`` gives; ``None`` without one.

    Raises:
        PluginError: for something else under that name; ``purpose`` says what it cannot do then.
    """
    if not any(installed.name == name for installed in installed_plugins()):
        return None
    make = getattr(load_plugin(name), method, None)
    if not callable(make):
        raise PluginError(
            f"the plugin installed as '{name}' has no {method}(), so it cannot {purpose}; pass "
            "plugins=[...] instead."
        )
    made: object = make(*given)
    return made
