"""Documented names that moved: they work through 0.x and say where they are now.

[Note: moved modules]
A file for each moved module would fill the front room with files that say nothing. One finder at
the end of ``sys.meta_path`` answers for all of them: it is asked only after every real module was
looked for in vain, so it costs nothing while nobody uses an old name.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from typing_extensions import override

MODULES = {
    "polyshard.calibration": "polyshard_calibration",
    "polyshard.compat": "polyshard.fsdp1",
    "polyshard.contract": "polyshard.plugins.contract",
    "polyshard.defaults": "polyshard.plugins.builtin",
    "polyshard.demo": "polyshard_demo",
    "polyshard.hookspecs": "polyshard.plugins.hookspecs",
    "polyshard.layout": "polyshard.sharding.layout",
    "polyshard.markers": "polyshard.plugins.contract",
    "polyshard.mesh": "polyshard.sharding.mesh",
    "polyshard.placement": "polyshard.sharding.placement",
}
NAMES = {"Calibration": "polyshard_calibration"}


def moved_name(name: str) -> Any:
    """A name of ``polyshard`` that is at home elsewhere now.

    Raises:
        AttributeError: for any other name, and where its new home is not installed.
    """
    home = NAMES.get(name)
    if home is None:
        raise AttributeError(f"module 'polyshard' has no attribute '{name}'")
    try:
        found = getattr(importlib.import_module(home), name)
    except ImportError as error:
        raise AttributeError(
            f"polyshard.{name} moved to {home}, which is not installed: pip install "
            f"{home.replace('_', '-')}"
        ) from error
    say_moved(f"polyshard.{name}", f"{home}.{name}")
    return found


def say_moved(old: str, new: str) -> None:
    """Warn the caller's caller that ``old`` is ``new`` now."""
    warnings.warn(
        f"{old} moved to {new}; the old name works through 0.x", DeprecationWarning, stacklevel=3
    )


class MovedModules(MetaPathFinder, Loader):
    """Imports a module by its old name. See [Note: moved modules]."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for the old name of a module; ``None`` for everything else."""
        del path, target
        return ModuleSpec(fullname, self) if fullname in MODULES else None

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module at its new place, itself: its classes stay one and the same."""
        new = MODULES[spec.name]
        say_moved(spec.name, new)
        module = importlib.import_module(new)
        spec.loader_state = module.__spec__
        return module

    @override
    def exec_module(self, module: ModuleType) -> None:
        """It was executed at its new place; the import system took its spec for this one's."""
        spec = module.__spec__
        assert spec is not None
        module.__spec__ = spec.loader_state


def install() -> None:
    """Have old module names found; once, however often polyshard is imported."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
