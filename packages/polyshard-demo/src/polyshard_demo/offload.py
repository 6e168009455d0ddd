"""``--offload``: from text to a plugin object of polyshard-offload, if that is installed."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch

from polyshard_demo.errors import DemoError

__all__ = ["OffloadPlugin", "make_offload"]

TIERS = ("params", "grads", "optimizer")
KEYS = (*TIERS, "fraction", "path")


class OffloadPlugin(Protocol):
    """What the demo needs of the plugin."""

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The same optimizer, with its state where the plugin keeps it."""
        ...


def make_offload(text: str) -> OffloadPlugin | None:
    """The plugin that ``text``, such as ``optimizer=disk,params=host``, asks for.

    Raises:
        DemoError: for text that means nothing, a combination that cannot work, or without the
            plugin.
    """
    chosen = _parsed(text)
    if not chosen:
        return None
    if find_spec("polyshard_offload") is None:
        raise DemoError(
            "--offload needs a plugin that is not installed: pip install polyshard-offload"
        )
    from polyshard_offload import DiskSettings, Offload

    settings: dict[str, Any] = {name: chosen[name] for name in TIERS if name in chosen}
    try:
        if "fraction" in chosen:
            settings["fraction"] = float(chosen["fraction"])
        if "path" in chosen:
            settings["disk"] = DiskSettings(path=Path(chosen["path"]))
        made: OffloadPlugin = Offload(**settings)
    except ValueError as error:
        raise DemoError(f"--offload {text}: {error}") from error
    return made


def _parsed(text: str) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or name not in KEYS or name in chosen:
            raise DemoError(
                f"--offload {text}: cannot read {part!r}; write each of {', '.join(KEYS)} at most "
                "once, as optimizer=disk,params=host"
            )
        chosen[name] = value
    return chosen
