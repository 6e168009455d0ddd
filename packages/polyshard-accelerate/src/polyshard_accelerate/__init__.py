"""polyshard under accelerate (:class:`PolyshardAccelerator`) and transformers' ``Trainer``."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from polyshard_accelerate.__about__ import __version__
from polyshard_accelerate.sharding import Sharding

if TYPE_CHECKING:
    from polyshard_accelerate.accelerator import PolyshardAccelerator
    from polyshard_accelerate.trainer import PolyshardTrainer

__all__ = ["PolyshardAccelerator", "PolyshardTrainer", "Sharding", "__version__"]

_HOMES = {"PolyshardAccelerator": "accelerator", "PolyshardTrainer": "trainer"}
_NEEDS = {"accelerator": ("accelerate",), "trainer": ("accelerate", "transformers")}

if not TYPE_CHECKING:  # else every misspelt name would have a type

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'polyshard_accelerate' has no attribute '{name}'")
        home = _HOMES[name]
        missing = [needed for needed in _NEEDS[home] if find_spec(needed) is None]
        if missing:
            raise ImportError(
                f"{name} needs {' and '.join(missing)}, not installed: "
                f"pip install 'polyshard-accelerate[{_NEEDS[home][-1]}]'."
            )
        return getattr(importlib.import_module(f"polyshard_accelerate.{home}"), name)
