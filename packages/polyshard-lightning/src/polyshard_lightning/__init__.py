"""polyshard as a strategy of Lightning's ``Trainer``; importing this registers ``"polyshard"``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from polyshard_lightning.__about__ import __version__

__all__ = ["PolyshardStrategy", "__version__"]

if TYPE_CHECKING or find_spec("lightning") is not None:
    from polyshard_lightning.strategy import PolyshardStrategy
else:

    def __getattr__(name: str) -> Any:
        if name != "PolyshardStrategy":
            raise AttributeError(f"module 'polyshard_lightning' has no attribute '{name}'")
        raise ImportError(
            "PolyshardStrategy needs Lightning, which is not installed: "
            "pip install 'polyshard-lightning[lightning]'."
        )
