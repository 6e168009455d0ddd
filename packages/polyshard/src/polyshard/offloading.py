"""Torch's offload policy, by way of the plugin that offloads."""

from __future__ import annotations

from collections.abc import Sequence

from polyshard.discovery import installed_plugins, load_plugin
from polyshard.errors import PluginError, UnsupportedError
from polyshard.policies import CPUOffloadPolicy, OffloadPolicy

PLUGIN = "offload"
"""Name of the entry point; its plugin has ``for_policy(CPUOffloadPolicy)``, another plugin."""


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
    if not any(installed.name == PLUGIN for installed in installed_plugins()):
        raise UnsupportedError(
            "offload_policy=CPUOffloadPolicy() needs a plugin for offload: pip install "
            "polyshard-offload; it will be found. For more choices pass plugins=[Offload(...)]."
        )
    adapt = getattr(load_plugin(PLUGIN), "for_policy", None)
    if not callable(adapt):
        raise PluginError(
            f"the plugin installed as '{PLUGIN}' has no for_policy(), so it cannot stand for "
            "offload_policy=CPUOffloadPolicy(); pass plugins=[...] instead."
        )
    return [*plugins, adapt(policy)]
