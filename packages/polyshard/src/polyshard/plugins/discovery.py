"""Plugins by name: what is installed under the ``polyshard.plugins`` entry points.

pluggy would skip the second of two entry points with one name and stop at the first that fails to
import; scanning here lets both be reported. Being installed never activates a plugin.
"""

from __future__ import annotations

import difflib
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import ModuleType

from polyshard.errors import PluginError, UnsupportedError
from polyshard.plugins.needs import unmet_by_polyshard
from polyshard.policies import CPUOffloadPolicy, OffloadPolicy

ENTRY_POINTS = "polyshard.plugins"
OFFLOAD = "offload"
"""The plugin with ``for_policy(CPUOffloadPolicy)``, which gives a plugin that does the same."""
TENSOR_PARALLEL = "tensor_parallel"
"""The plugin with ``for_dtensors()``, which gives one that takes ``DTensor`` s as they are."""


@dataclass(frozen=True)
class Installed:
    """One entry point, not imported yet."""

    name: str
    distribution: str
    entry_point: EntryPoint

    def load(self) -> object:
        """Import it and make a plugin of it: an instance, a module, or what a factory returns.

        Raises:
            PluginError: naming the distribution and the entry point, when it is for another
                polyshard, or anything fails.
        """
        for problem in unmet_by_polyshard(self.entry_point.dist):
            raise PluginError(
                f"plugin '{self.name}': {self.distribution} {problem}. Install versions that fit; "
                "'polyshard plugins doctor' checks all."
            )
        try:
            found = self.entry_point.load()
            plugin: object = found() if callable(found) and not _is_plugin(found) else found
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a module may leave with SystemExit, say: its own problem
            raise PluginError(
                f"plugin '{self.name}' of {self.distribution} ({self.entry_point.value}) failed to "
                f"load: {type(error).__name__}: {error}. If it has settings without defaults, pass "
                "an object instead of the name."
            ) from error
        if plugin is None:
            raise PluginError(
                f"plugin '{self.name}' of {self.distribution} ({self.entry_point.value}) is None; "
                "a factory must return the plugin."
            )
        return plugin


def _is_plugin(found: object) -> bool:
    """Whether an entry point gave a ready plugin rather than a class or factory to call."""
    return isinstance(found, ModuleType) or (
        not isinstance(found, type) and hasattr(found, "polyshard_contract")
    )


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


def with_policy(plugins: Sequence[object | str], policy: object) -> Sequence[object | str]:
    """``plugins``, and what stands for ``policy``.

    Raises:
        UnsupportedError: for an unknown policy, or when the plugin is not installed.
        PluginError: when what is installed under its name is something else.
    """
    if type(policy) is OffloadPolicy or isinstance(plugins, str):
        return plugins
    if not isinstance(policy, CPUOffloadPolicy):
        raise UnsupportedError(
            f"offload_policy {policy!r} is not known to polyshard; offloading is a plugin."
        )
    if not any(installed.name == OFFLOAD for installed in installed_plugins()):
        raise UnsupportedError(
            "offload_policy=CPUOffloadPolicy() needs a plugin for offload: pip install "
            "polyshard-offload; it will be found. For more choices pass plugins=[Offload(...)]."
        )
    adapt = getattr(load_plugin(OFFLOAD), "for_policy", None)
    if not callable(adapt):
        raise PluginError(
            f"the plugin installed as '{OFFLOAD}' has no for_policy(), so it cannot stand for "
            "offload_policy=CPUOffloadPolicy(); pass plugins=[...] instead."
        )
    return [*plugins, adapt(policy)]


def for_dtensors() -> object | None:
    """What takes parameters that are ``DTensor`` s already; ``None`` where it is not installed.

    Raises:
        PluginError: when what is installed under its name is something else, or several are.
    """
    if not any(installed.name == TENSOR_PARALLEL for installed in installed_plugins()):
        return None
    adapt = getattr(load_plugin(TENSOR_PARALLEL), "for_dtensors", None)
    if not callable(adapt):
        raise PluginError(
            f"the plugin installed as '{TENSOR_PARALLEL}' has no for_dtensors(), so it cannot take "
            "parameters that are DTensors already; pass plugins=[...] instead."
        )
    plugin: object = adapt()
    return plugin
